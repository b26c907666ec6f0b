"""Execution of programs.

execute      runs the steps of a program
compiler     compiles instructions to steps
memory       the tensors of one run, in numbered slots
check        comparing what a task does with what it declared
profile      measured times of instructions while a program runs
hang_report  the position of each thread when a run is late
threads/     threads that execute steps
backends/    devices: CPU threads, accelerators, emulated machines
in_flight/   several runs of a schedule that execute at the same time
ranks/       copies between processes, and failures of them
replay/      recording runs and replaying them, with CUDA graphs on a GPU
"""
