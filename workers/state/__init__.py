"""The state that runs train: parameters, gradients, optimizer states, and where they are stored."""
