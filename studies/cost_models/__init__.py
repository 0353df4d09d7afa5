"""The learned cost models beside other methods, and how fast they are."""
