#!/bin/bash
# slurm.sh start|stop DIR [NODES]: a real Slurm of some nodes of one core each on this machine, as root, without systemd, from Debian's
# packages (slurmctld slurmd slurm-client munge). Of its two partitions, `low` is preempted and requeued by `high`.
set -eu
D=$(realpath -m "$2"); N=${3:-2}
export SLURM_CONF=$D/slurm.conf
case $1 in
start)
  mkdir -p "$D"/{state,log}; chmod 755 "$D"
  [ -f "$D/munge.key" ] || (umask 077; dd if=/dev/urandom of="$D/munge.key" bs=1024 count=1 status=none)
  munged --force --key-file="$D/munge.key" --socket="$D/munge.sock" --pid-file="$D/munged.pid" --log-file="$D/log/munged.log" --seed-file="$D/munge.seed"
  CPUS=${CPUS:-1}; MEM=${MEM:-4000}; P=${PORT:-17000}
  cat > "$D/slurm.conf" <<C
ClusterName=here
SlurmctldHost=localhost
SlurmctldPort=$P
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$D/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool.%n
SlurmctldPidFile=$D/slurmctld.pid
SlurmdPidFile=$D/slurmd.%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=5,bf_interval=5
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=5
MinJobAge=300
SlurmdTimeout=300
SlurmctldTimeout=300
InactiveLimit=0
Waittime=0
NodeName=n[1-$N] NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=[$((P+1))-$((P+N))] CPUs=$CPUS RealMemory=$MEM State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=${GRACE:-5}
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
C
  case $(slurmd -V) in *" 2"[01].*|*" 22."*) c=cgroup/v1;; *) c=disabled;; esac  # 22.05 knows no "disabled"
  echo "CgroupPlugin=${CG:-$c}" > "$D/cgroup.conf"
  slurmctld -c
  for i in $(seq $N); do mkdir -p "$D/spool.n$i"; slurmd -N n$i; done
  while [ $SECONDS -lt 120 ]; do [ "$(sinfo -h -N -p low -o %T 2>/dev/null | grep -cx idle)" = $N ] && exit 0; sleep .1; done
  echo "not all nodes came up" >&2; sinfo -N -l >&2; tail -3 "$D"/log/*.log >&2; exit 1;;
stop)
  scancel --full -Q -u root 2>/dev/null || :
  for f in "$D"/slurmd.*.pid "$D"/slurmctld.pid "$D"/munged.pid; do [ -f "$f" ] && kill "$(cat "$f")" 2>/dev/null || :; done;;
esac
