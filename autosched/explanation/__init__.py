"""Explaining: why a schedule takes as long as it does, and what would help.

Facts are read off a timeline, predicted or measured. Advice is a change whose gain is simulated,
one change at a time. Changes nothing, runs nothing.

==========  ==================================================================================
case        a schedule, and what would be if something were otherwise
causes      what each task and each copy begins behind, and why there
facts       the critical path, idle times by cause, slack
choice      why a task runs where and when it does
transfers   advice: page-locked memory, streams for copies
homes       advice: inputs that could stay on accelerators
work        advice: tasks too small for their launch, reads on the host
places      advice: other placements, more devices, fewer
report      what ``explain`` returns for a whole schedule, and its words
==========  ==================================================================================

To add a remedy, write a function that yields ``Remedy``, with the makespan that it predicts, and
name it in
``report.explain``.
"""

from autosched.explanation.advice import Advice
from autosched.explanation.case import Case
from autosched.explanation.choice import TaskExplanation, explain_task
from autosched.explanation.report import Explanation, explain

__all__ = ["Advice", "Case", "Explanation", "TaskExplanation", "explain", "explain_task"]
