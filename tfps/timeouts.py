"""The grace periods that depend on each other, in seconds: each is computed from the one that it must outlast.

A task that must end saves first. So whoever waits for its end, or would kill it, has to wait longer than it may take;
and whoever waits for that one, longer still. A period that no other one depends on is in the module that uses it.
"""

# One task, from a request to stop to its exit.
WORKER_GRACE_SECS = 6.0  # for a worker's present step, which may never end because a peer is lost
SAVED_WITHIN_SECS = WORKER_GRACE_SECS + 3.0  # for the step and the chief's last checkpoint
PS_GRACE_SECS = SAVED_WITHIN_SECS + 0.5  # for the workers, whose last save needs the PS
PS_BLOCKED_GRACE_SECS = 2 * PS_GRACE_SECS  # for a PS whose thread does not see its own deadline, blocked in TensorFlow
TASK_END_SECS = PS_GRACE_SECS + 0.5  # what any task promises: it has exited by then

# Who waits for tasks on the same machine, or on the other end of a pipe.
KILL_AFTER_SECS = TASK_END_SECS + 2.0  # what starts a task waits this long for its end, then kills it
ORPHANED_SECS = KILL_AFTER_SECS + 3.0  # a new chief waits for the end of an old one whose launcher has gone
RAY_ACTOR_END_SECS = KILL_AFTER_SECS + 1.0  # an actor waits for what a killed shell or supervisor has left to end
RAY_STOP_SECS = KILL_AFTER_SECS + 3.0  # the driver of a Ray job waits for its actors, which stop their tasks
SSH_CLOSE_SECS = KILL_AFTER_SECS + 8.0  # tfps submit waits for the hosts' shells, which kill the tasks

# Who waits for a supervised task, or for a driver of tasks, through a platform. The platforms take whole seconds.
CONTAINER_STOP_SECS = int(KILL_AFTER_SECS + 8)  # Docker kills a container that has not ended
SLURM_STOP_SECS = float(CONTAINER_STOP_SECS)  # tfps cancel waits for a step to save before it cancels the rest
RAY_DRIVER_STOP_SECS = int(2 * RAY_STOP_SECS)  # Ray kills a driver that has not ended
POD_STOP_SECS = CONTAINER_STOP_SECS + 10  # the kubelet kills the containers of a pod; a PS waits for the chief's save
POD_DELETE_SECS = 3 * POD_STOP_SECS  # kubectl waits until pods are gone; they may be stopped one after another
CLIENT_SECS = POD_DELETE_SECS + 30.0  # a platform's own program, like kubectl, may take this long
CANCEL_SECS = 2.0 * RAY_DRIVER_STOP_SECS  # tfps cancel waits for a scheduler's job, then reports that it has not ended

# Since when a process must have been silent to be lost or frozen.
MUTE_AFTER_SECS = 20.0  # a PS that accepts connections but does not answer is frozen; it ends the job's step
BUSY_MUTE_AFTER_SECS = 3 * MUTE_AFTER_SECS  # the same for a chief without PS, which may not answer while it computes
TCP_TIMEOUT_SECS = MUTE_AFTER_SECS  # data that a peer has not acknowledged for so long ends the connection
STALLED_AFTER_SECS = MUTE_AFTER_SECS - 5.0  # a launcher kills a frozen task before its peers give it up
REPLACED_AFTER_SECS = 20.0  # in sync mode, workers wait this long for a lost one that may be started again
REPLACED_AT_END_SECS = 3 * REPLACED_AFTER_SECS  # in async mode, the chief does, if its own input has ended before
LONGEST_RESTART_PAUSE_SECS = REPLACED_AFTER_SECS / 2  # so that a task is started again while others wait for it
PLATFORM_SILENT_SECS = 60.0  # a platform that has not answered for so long is given up
RAY_LOGS_SILENT_SECS = PLATFORM_SILENT_SECS + 30.0  # the reader of logs outlasts JobPoller, which asks for the status

# Stop signals that come sooner than this after another one are the same request: shell, platform and user may all send.
SECOND_THOUGHT_SECS = 2.0
