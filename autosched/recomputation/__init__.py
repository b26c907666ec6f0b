"""What is computed again instead of kept, so that a device's memory suffices.

rewrite     a graph in which tasks are repeated, with the same results
repeats     the steps of each device, and the problem in which some are repeated
sequence    which steps of a device are repeated where: numbers alone, no graph
chains      the optimum of chains, and a beginning for other graphs
annealing   orders with repetitions, improved
"""
