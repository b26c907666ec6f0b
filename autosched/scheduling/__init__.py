"""Schedule graphs on machines.

planning        ``schedule()``
plans           the program of a placement, its predicted times, and the choice among several
runs_in_flight  how many runs are in flight
agreement       schedules that several ranks make together
schedule        Schedule: graph, machine, placement and program; reading saved ones
running         its methods for several runs
periodic        its predictions for several runs
resident_state  state that stays on devices between runs
arguments       checks of what users pass
saved           schedules as JSON
hosting         tasks without tensor arguments run on the host
progress_bar    the progress of planning in a terminal
"""
