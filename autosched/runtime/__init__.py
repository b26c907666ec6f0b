"""Execution of programs.

execute      runs a program, and measures the times of its instructions
compiler     emits the functions of threads, with what a backend does for each instruction
memory       the tensors of one run, in numbered slots
check        comparing what a task does with what it declared
failures     the error of a task, and the position of each thread when a run is late
threads/     threads that execute these functions
backends/    devices: CPU threads, accelerators, emulated machines
in_flight/   several runs of a schedule that execute at the same time
ranks/       copies between processes, and failures of them
replay/      recording runs and replaying them, with CUDA graphs on a GPU
"""
