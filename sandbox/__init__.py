"""Programs written by a model, run where they can do no harm: `python -m sandbox.server`.

server       HTTP: SandboxFusion's wire format, a fair queue, sessions
pool         the server's side of a run: pipes drained, limits named, a run cancelled
zygote       a warm interpreter that forks one supervisor a run
supervise    the supervisor: pid 1 of the run's namespaces; enforces time, ends every process
confine      what the program's own process gives up before its first instruction
probe        attacks tried at start; they decide which tier this machine can hold
"""
