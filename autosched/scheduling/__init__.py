"""Schedule graphs on machines.

planning      ``schedule()``: arguments, the problem, and which policies are tried
plans         placements, their programs, the choice among several, and limits of memory
agreement     schedules that several ranks make together
schedule      Schedule: problem, placement and program; its runs; reading saved ones
binding       how a graph is called, which a capture knows
kept_state    state that stays on devices between runs
arguments     checks of what users pass
saved         schedules as JSON
progress_bar  the progress of planning in a terminal
"""
