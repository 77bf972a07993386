"""Programs written by a model, run where they can do no harm: `python -m sandbox.server`.

server       HTTP: SandboxFusion's wire format, refusals, headers
gate         what a client can cost before, and after, its request is understood
service      what the endpoints do
fair         a queue for places and memory, shared by clients
sessions     stateful interpreters, by client and name
pool         the server's side of a run: pipes drained, limits named, a run cancelled
zygote       a warm interpreter that forks one supervisor a run
supervise    the supervisor: pid 1 of the run's namespaces; enforces time, ends every process
watch        what a run's processes use: time, threads, files
memory       what they hold, in the kernel too
confine      what the program's own process gives up before its first instruction
claim        folders that say by a lock whose they are
probe        attacks tried at start; they decide which tier this machine can hold
"""
