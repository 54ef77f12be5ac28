"""The client: from a message to an update, with its store on disk and, in trainers/, one file a method.

May import training and what is below it; a board loads nothing of the server.
"""
