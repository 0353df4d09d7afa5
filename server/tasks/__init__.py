"""Tasks that planning processes do: what they are asked, how each kind is answered, and how large it may be."""
