#!/bin/bash
# Written by tfps. To submit it: sbatch --parsable FILE
#SBATCH --job-name=mnist
#SBATCH --output=/dev/null
#SBATCH --requeue
#SBATCH --signal=TERM@90
#SBATCH --ntasks=2
#SBATCH --cpus-per-task=2
#SBATCH --mem-per-cpu=512

trap 'ending=1' TERM     # Slurm ends or requeues the job
trap 'cancelled=1' USR1  # tfps cancel does
roles='ps 2'
logs=/shared/m/logs
task='
trap : TERM  # the task gets it, too, and saves
if ((SLURM_PROCID < $2)); then role=$1 k=$SLURM_PROCID; else role=$3 k=$((SLURM_PROCID - $2)); fi
shift 3
echo "$role/$k started on $SLURMD_NODENAME"
"$@" "--job_name=$role" >>"$logs/slurm-$SLURM_JOB_ID-$role-$k.out" 2>&1
code=$?
echo "$role/$k ended with $code on $SLURMD_NODENAME"
exit "$code"
'
each=(
  --kill-on-bad-exit=1 --export=ALL --distribution=block
  bash -c "$task" tfps ps 2 ps
  /venv/bin/python -m tfps run --num_ps=2 --model_dir=/shared/m --optimizer=adam --serve=1 --start_timeout_secs=600 --max_restarts=10 --max_steps=1000
  "--port_base=$((8888 + SLURM_JOB_ID * 727 % 1400 * 16))"
)

mkdir -p -- "$logs" && exec >>"$logs/slurm-$SLURM_JOB_ID.out" 2>&1 || exit 74
cd -- /home/me || exit 2
unset TF_CONFIG
export logs PYTHONUNBUFFERED=1 SLURM_WAIT=0  # a worker that is done does not end the others
echo "run ${SLURM_RESTART_COUNT:-0}"

set -o pipefail
ended=$(
  srun --ntasks=2 --cpus-per-task=2 --mem-per-cpu=512 "${each[@]}" |
    { tee -a "$logs/slurm-$SLURM_JOB_ID.out" || true; }  # a full disk ends no job
)
code=$?

# srun's exit code is the highest. The cause is a task that a restart cannot help (< 128), else the first that failed.
# A ps that ends with 67 only repeats that a worker has failed.
cause=0
while read -r name word _ told _; do
  [[ $word == ended ]] && ((told)) && [[ $name:$told != ps/*:67 ]] || continue
  ((cause)) || cause=$told
  ((told < 128)) && cause=$told && break
done <<<"$ended"
((cause)) && code=$cause

if ((cancelled)); then
  scancel "$SLURM_JOB_ID"
elif ((code && !ending && (cause == 0 || cause == 137 || cause == 143))); then
  # A node is lost, or a task was killed with what starts it again.
  # Ten times; after ten minutes of work it is no failure that only repeats itself, but a time limit, say.
  # The requeue itself ends every process here: scontrol is to outlive that, or it looks as if it had failed.
  if ((${SLURM_RESTART_COUNT:-0} < 10 || SECONDS > 600)) &&
    (trap '' TERM && exec scontrol requeue "$SLURM_JOB_ID"); then
    echo "requeued after $code"
    exit "$code"
  fi
fi
echo "ended with exit code $code"
exit "$code"
