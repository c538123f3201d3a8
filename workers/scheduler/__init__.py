"""Decides which work goes to the ranks of a group next, and handles the ranks' deaths. Runs in the server's process.

Work (work.py) is what one caller waits for: an operation (a forward or forward_backward of a run), an optimizer step, a
method, a snapshot or a sampling job. A call (calls.py) is what the ranks are sent at once, mostly with the work of many
runs. What a pass computes of an operation is an OperationPart: all of it, or a chunk of a large one.

- tainted: a run is tainted when a call with an operation of it failed as a whole. Its gradients are incomplete, which
  ranks may not know, so its next optimizer step is refused: it only discards them (Scheduler.held).
- lost: what only the ranks held when one of them died. Its callers get WorkerLost, and the server rebuilds runs.
- suspect: all work in the call in which a rank died, and the snapshots that were being written. It is retried apart
  from other work until it is past the point of the death (quarantine.py).
- alone: work next to which nothing else ran when the rank died. The death is then a strike against it
  (server/journal/strikes.py).
- given up: work with MAX_STRIKES, which is not retried.
"""
