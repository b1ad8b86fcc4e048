#!/usr/bin/env bash
# A Slurm of one node on this machine, to try grids on: no service, loopback only, all files in FOLDER.
#   workflow/slurm_here.sh start FOLDER; export SLURM_CONF=FOLDER/slurm.conf; ...; workflow/slurm_here.sh stop FOLDER
# Snakemake needs --slurm-status-command squeue here: it would ask sacct, which has no accounting to answer from, and wait for ever.
# Needs Debian's slurm-wlm and munge, and root (munge wants a user of its own).
set -euo pipefail
command=${1:?start, mend, controller or stop}; folder=$(realpath -m "${2:?a folder}")

stop() { # $1: a file with a process number
  [ -f "$1" ] || return 0
  local process; process=$(cat "$1")
  kill "$process" 2>/dev/null || true
  for _ in $(seq 50); do kill -0 "$process" 2>/dev/null || break; sleep .1; done
  kill -9 "$process" 2>/dev/null || true
  rm -f "$1"
}

configure() {
  mkdir -p "$folder"/{state,spool,munge}
  [ -f "$folder/munge/key" ] || head -c 1024 /dev/urandom > "$folder/munge/key"
  chmod 711 "$folder" "$folder/munge"; chmod 400 "$folder/munge/key"
  chown -R munge "$folder/munge"
  local cpus memory; cpus=$(env -u OMP_NUM_THREADS nproc); memory=$(awk '/MemTotal/ {print int($2/1024*0.8)}' /proc/meminfo)
  # inside a job Slurm's commands look for their configuration here alone
  local usual=/etc/slurm/slurm.conf; mkdir -p /etc/slurm
  if [ ! -e "$usual" ]; then ln -sfn "$folder/slurm.conf" "$usual"; fi # a link that leads nowhere is of a Slurm that was killed
  cat > "$folder/slurm.conf" <<EOF
ClusterName=here
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=root
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
JobRequeue=0
KillWait=2
MinJobAge=600
SchedulerParameters=sched_interval=2,batch_sched_delay=1
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=$memory State=UNKNOWN
PartitionName=here Nodes=ALL Default=YES MaxTime=INFINITE State=UP
EOF
}

case $command in
  start)
    configure
    # setuidgid would be another package; su is everywhere
    su -s /bin/sh munge -c "munged --force --key-file='$folder/munge/key' --socket='$folder/munge/socket' \
      --pid-file='$folder/munge/pid' --log-file='$folder/munge/log' --seed-file='$folder/munge/seed'"
    export SLURM_CONF=$folder/slurm.conf
    slurmctld; slurmd
    for _ in $(seq 100); do sinfo -h -o %T 2>/dev/null | grep -q idle && exit 0; sleep .3; done
    echo "slurm must have an idle node within 30 s, got none; see $folder/slurmctld.log" >&2
    exit 1;;
  # A killed controller has forgotten the jobs of its last seconds: it gives their numbers out again, and then holds the job and drains the node
  mend)
    export SLURM_CONF=$folder/slurm.conf
    squeue -h -t PD -o '%i %r' | awk '/held|failed/ {print $1}' | xargs -r scancel
    if sinfo -h -o %T | grep -q drain; then scontrol update "NodeName=$(hostname -s)" State=RESUME; fi;;
  controller) export SLURM_CONF=$folder/slurm.conf; slurmctld;; # again, after it was killed
  stop)
    # a job's shepherd outlives the daemon that started it
    for process in $(pgrep slurmstepd); do
      if ls -l "/proc/$process/fd" 2>/dev/null | grep -qF " $folder/"; then kill -9 "$process" || true; fi
    done
    stop "$folder/slurmd.pid"; stop "$folder/slurmctld.pid"; stop "$folder/munge/pid"
    if [ "$(readlink /etc/slurm/slurm.conf)" = "$folder/slurm.conf" ]; then rm /etc/slurm/slurm.conf; fi;;
  *) echo "command must be start, mend, controller or stop, got $command" >&2; exit 2;;
esac
