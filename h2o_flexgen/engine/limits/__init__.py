"""The limits of the machine: caps, plans that fit them, and what happens when memory runs out."""
