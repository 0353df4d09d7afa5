"""Neo's evaluation: its production models on ZionEX, planned and priced by autoshard."""
