"""What the machine allows: caps, plans that fit them, and what happens when memory runs out."""
