"""Pure tensor functions with two or more users."""
