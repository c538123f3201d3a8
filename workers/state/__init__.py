"""What runs learn: parameters, gradients, optimizer states, and where they are."""
