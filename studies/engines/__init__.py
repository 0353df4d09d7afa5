"""How fast the runtime's own engine is: beside TorchRec's, and what a step takes without data to move."""
