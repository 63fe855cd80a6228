"""What is computed: programs, passes, the ops as nodes of a MAX graph, the networks' tables."""
