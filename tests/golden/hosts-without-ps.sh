python -m tfps run '--worker_hosts=h1:2222,[fe80::1]:2223' --job_name=worker --task_index=0 --model=mnist --model_dir=/shared/m --mode=sync --start_timeout_secs=600 --max_restarts=10  # on h1
python -m tfps run '--worker_hosts=h1:2222,[fe80::1]:2223' --job_name=worker --task_index=1 --model=mnist --model_dir=/shared/m --mode=sync --start_timeout_secs=600 --max_restarts=10  # on fe80::1
