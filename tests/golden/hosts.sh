python -m tfps run --ps_hosts=h0:2222 '--worker_hosts=h1:2222,[fe80::1]:2223' --job_name=ps --task_index=0 --model=mnist --model_dir=/shared/m --mode=sync --start_timeout_secs=600.0  # on h0
python -m tfps run --ps_hosts=h0:2222 '--worker_hosts=h1:2222,[fe80::1]:2223' --job_name=worker --task_index=0 --model=mnist --model_dir=/shared/m --mode=sync --start_timeout_secs=600.0  # on h1
python -m tfps run --ps_hosts=h0:2222 '--worker_hosts=h1:2222,[fe80::1]:2223' --job_name=worker --task_index=1 --model=mnist --model_dir=/shared/m --mode=sync --start_timeout_secs=600.0  # on fe80::1
