"""What a run left, read and shown: one page a run, tables in the terminal, lines while it runs, runs side by side.

`read_records` checks the records; `page` has the building blocks of pages, `display` those of the terminal.
"""
