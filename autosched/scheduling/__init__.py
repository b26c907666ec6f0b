"""Schedule graphs on machines.

planning        ``schedule()``: placements, their programs, and the choice among several
runs_in_flight  how many runs are in flight
agreement       schedules that several ranks make together
schedule        Schedule: graph, machine, placement and program; reading saved ones
running         its methods for several runs, and state that stays on devices between them
arguments       checks of what users pass
saved           schedules as JSON
progress_bar    the progress of planning in a terminal
"""
