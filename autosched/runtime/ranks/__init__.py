"""Execution over several ranks, which are processes that torch.distributed joins.

What each of them does::

    all call                 and each                                             by
    Machine.cluster()        meets the others, and gets the devices of all        _lib/process_group, machine/cluster
    asc.schedule()           takes the plan of rank 0, compares its own graph,    scheduling/agreement
                             proves the program of all ranks, takes its part      verification, program/parts
    schedule(x=...)          runs its part, in the order of the one program       here

        part of rank 0                       part of rank 1
        cpu:0/compute   run h                                              A copy between ranks is a send
        cpu:0/compute   record e0                                          and a receive, at one position
        cpu:0/copy-out  wait e0                                            of the one order: so nobody
        cpu:0/copy-out  send h -> cpu:1 ---> cpu:1/copy-in   receive h     waits for ever. Events and
                                             cpu:1/copy-in   record e1     memory are of one rank
        cpu:0/copy-out  record e2            cpu:1/compute   wait e1       (lowering/ranks).
        cpu:0/compute   wait e2              cpu:1/compute   run y
        cpu:0/compute   free h

A send or receive is started by the thread that computes, and waited for by who needs its event. A
rank that fails says why in the store, and closes its connections; that wakes the others, one after
another, and all raise its error.

backend    the threads that issue a part, on CPUs alone or with accelerators
exchange   sends and receives as works that events stand for; values as rows of bytes
generators random numbers of several ranks that one process plays
"""
