"""A model, a method, a data set and a callback for Piecework."""
