"""Write what a run left in the formats of others: its trained model for the runtimes of devices, and its records.

`formats.FORMATS` names them. Each module imports the library that it writes for only when it is asked to.
"""
