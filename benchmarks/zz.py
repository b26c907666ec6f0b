import time
import hosts_training as h
if __name__ == "__main__":
    for job, kind in ((h.data_parallel, "6 KiB of gradients"), (h.data_parallel, "9 MiB of gradients")):
        t = time.time(); r = h.measured(job, kind, 10); print(h.row(kind, r), time.time() - t, flush=True)
