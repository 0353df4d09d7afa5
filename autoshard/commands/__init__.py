"""Commands of the library itself; other packages add theirs by entry points."""
