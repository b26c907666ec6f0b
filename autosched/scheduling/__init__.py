"""Schedule graphs on machines.

planning      ``schedule()``
schedule      Schedule: graph, machine, placement and program
arguments     checks of what users pass
saved         schedules as JSON
hosting       tasks without tensor arguments run on the host
rebuilding    a saved schedule's graph without its functions
progress_bar  the progress of planning in a terminal
"""
