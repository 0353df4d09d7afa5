"""TorchRec's DLRM on Criteo's tables, trained by TorchRec and by autoshard's engine, side by side."""
