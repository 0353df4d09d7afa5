"""The compiled search: `search.c`, what it works on, and how it is called."""
