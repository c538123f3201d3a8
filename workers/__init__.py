"""Holds the compute side: dispatch, rank groups, worker processes and sampling engines. Knows no HTTP and never imports
the server.

In the server's process run dispatch, scheduler, engines and the server's ends of pools and protocol. A rank's process
begins at `pools/worker_host.py` and runs worker, training, batch, heads, losses, state, registry, lora, full, drafts,
models, ops, parallel, resources, checkpoint and sampler. Planner and shapes belong to both.
"""
