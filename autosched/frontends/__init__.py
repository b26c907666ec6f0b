"""What comes from outside and becomes a graph, or the costs of one: networkx, example tensors."""
