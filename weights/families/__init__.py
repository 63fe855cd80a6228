"""The families of networks: what their checkpoints call the weights, and what else is theirs."""
