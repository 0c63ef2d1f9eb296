"""Public failures, each in our own short form; where it was read is beside it.

NVRx: categories and descriptions of `attribution/restart_agent`; ByteRobust: arXiv 2509.16293.
"""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """What is right of some lines, by their source.

    Attributes
    ----------
    name, read
        What it is, and where such lines are known from.
    kind, ranks
        The right class and ranks.
    texts, pids
        As `ckptd.monitor.rules.said.said` takes them.
    """

    name: str
    read: str
    kind: str
    ranks: tuple[int, ...]
    texts: dict[str, str]
    pids: dict[int, int] = {}


_WATCHDOG = (
    "[rank{0}]:[E1129 10:20:{1} ProcessGroupNCCL.cpp:685] [Rank {0}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=61, OpType=ALLREDUCE) ran for 600001 milliseconds\n"
)
_GONE = (
    "[rank{0}]:[E1129 10:20:{1} ProcessGroupNCCL.cpp:1] ncclRemoteError: remote process exited\n"
)
_ENDED = "W1129 10:30:01.000000 9 api.py:900] Sending process 77 closing signal SIGTERM\n"
_TRACE = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    run()\n'

CASES = (
    Case(
        "one of four does not come to a call",
        "PyTorch, ProcessGroupNCCL's watchdog",
        "call timed out",
        (2,),
        {
            f"rank {n}": _WATCHDOG.format(n, "01.5") if n != 2 else "step 60 loss 2.1\n"
            for n in range(4)
        },
    ),
    Case(
        "all time out",
        "NVRx 11",
        "call timed out",
        (),
        {f"rank {n}": _WATCHDOG.format(n, "01.5") for n in range(4)},
    ),
    Case(
        "device memory on one, the others time out",
        "NVRx 32",
        "device memory",
        (3,),
        {
            "rank 3": _TRACE
            + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n",
            "rank 0": _WATCHDOG.format(0, "31.0"),
            "rank 1": _WATCHDOG.format(1, "31.2"),
        },
    ),
    Case(
        "device memory on AMD",
        "PyTorch on ROCm",
        "device memory",
        (1,),
        {"rank 1": _TRACE + "torch.OutOfMemoryError: HIP out of memory. GPU 0 has 64 GiB\n"},
    ),
    Case(
        "the kernel ends a rank",
        "Linux, oom_kill.c; NVRx 31",
        "host memory",
        (5,),
        {
            "kernel": "Nov 29 10:19:58 n3 kernel: Out of memory: Killed process 4242 (python)\n",
            "node": "E1129 10:20:01.0 api.py:9] failed (exitcode: -9) local_rank: 5 (pid: 4242)\n",
        },
        {4242: 5},
    ),
    Case(
        "a cgroup's memory",
        "Linux, memcontrol.c",
        "host memory",
        (0,),
        {"kernel": "[ 12.5] Memory cgroup out of memory: Killed process 77 (pt_main)\n"},
        {77: 0},
    ),
    Case(
        "ended by SIGKILL, no reason known",
        "torchrun's summary",
        "killed",
        (2,),
        {"node": "E1129 10:20:01.0 1 api.py:9] failed (exitcode: -9) local_rank: 2 (pid: 1)\n"},
    ),
    Case(
        "a device falls off the bus",
        "NVIDIA Xid 79; ByteRobust",
        "device fault",
        (6,),
        {
            "kernel": "Nov 29 10:20:00 n1 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=900, GPU has "
            "fallen off the bus.\n",
            "rank 6": _TRACE + "RuntimeError: CUDA error: unspecified launch failure\n",
        },
        {900: 6},
    ),
    Case(
        "a double-bit error",
        "NVIDIA Xid 48",
        "device fault",
        (1,),
        {"kernel": "[99.0] NVRM: Xid (PCI:0000:5e:00): 48, pid=31, Double Bit ECC Error\n"},
        {31: 1},
    ),
    Case(
        "NVLink",
        "NVIDIA Xid 74; NVRx 7",
        "device fault",
        (1,),
        {"rank 1": _TRACE + "RuntimeError: CUDA error: uncorrectable NVLink error detected\n"},
    ),
    Case(
        "a program's access, by the driver",
        "NVIDIA Xid 31",
        "device program",
        (4,),
        {
            "kernel": "[5.0] NVRM: Xid (PCI:0000:5e:00): 31, pid=55, MMU Fault\n",
            "rank 4": _TRACE + "RuntimeError: CUDA error: an illegal memory access\n",
        },
        {55: 4},
    ),
    Case(
        "a machine check",
        "Linux, mce; ByteRobust",
        "machine check",
        (),
        {"kernel": "Nov 29 10:20:00 n1 kernel: mce: [Hardware Error]: CPU 3: Machine Check\n"},
    ),
    Case(
        "retries of a link run out",
        "NCCL net_ib; NVRx 8",
        "link fault",
        (1,),
        {
            "rank 1": "n2:1:2 [1] transport/net_ib.cc:99 NCCL WARN NET/IB : Got completion by peer"
            " with status=IBV_WC_RETRY_EXC_ERR(12)\n" + _GONE.format(1, "05.0"),
            "rank 0": _WATCHDOG.format(0, "59.0"),
        },
    ),
    Case(
        "a port goes down",
        "mlx5_core; ByteRobust",
        "link fault",
        (),
        {
            "kernel": "Nov 29 10:18:00 n2 kernel: mlx5_0: port 1 link down\n",
            "rank 0": _GONE.format(0, "00.0"),
            "rank 1": _GONE.format(1, "00.1"),
        },
    ),
    Case(
        "a peer's program ends first",
        "NVRx 13, 28",
        "program",
        (2,),
        {
            "rank 0": _GONE.format(0, "09.0"),
            "rank 2": _TRACE + "AttributeError: 'NoneType' object has no attribute 'shape'\n",
            "node": _ENDED,
        },
    ),
    Case(
        "all output in one file, with torchrun's prefixes",
        "torchrun --tee 3",
        "program",
        (3,),
        {
            "node": "[rank3]: Traceback (most recent call last):\n[rank3]:   File 'a.py', line 1\n"
            "[rank3]: TypeError: float() argument must be a string\n" + _ENDED
        },
    ),
    Case(
        "a device assertion",
        "PyTorch; NVRx 30",
        "device program",
        (0,),
        {"rank 0": _TRACE + "RuntimeError: CUDA error: device-side assert triggered\n"},
    ),
    Case(
        "a launch failure",
        "NVRx 33",
        "launch failure",
        (0,),
        {"rank 0": _TRACE + "RuntimeError: CUDA error: unspecified launch failure\n"},
    ),
    Case(
        "a loader's shared memory",
        "PyTorch; NVRx 15",
        "shared memory",
        (1,),
        {
            "rank 1": "ERROR: Unexpected bus error encountered in worker. This might be caused by "
            "insufficient shared memory (shm).\n" + _TRACE + "RuntimeError: DataLoader worker (pid "
            "3) is killed by signal: Bus error.\n"
        },
    ),
    Case(
        "a parallel file system",
        "Lustre; NVRx 16",
        "file system",
        (2,),
        {"rank 2": _TRACE + "OSError: [Errno 5] Input/output error: '/lustre/data/7.bin'\n"},
    ),
    Case(
        "NFS goes away",
        "Linux, nfs",
        "file system",
        (),
        {
            "kernel": "Nov 29 10:00:00 n1 kernel: nfs: server store not responding, still trying\n",
            "rank 0": _WATCHDOG.format(0, "31.0"),
        },
    ),
    Case(
        "rights of a cache",
        "NVRx 18",
        "missing rights",
        (0,),
        {"rank 0": _TRACE + "PermissionError: [Errno 13] Permission denied: '/cache/index.npy'\n"},
    ),
    Case(
        "a compiler",
        "PyTorch; NVRx 29",
        "compiler",
        (1,),
        {"rank 1": _TRACE + "torch._inductor.exc.InductorError: LoweringException: aten.foo\n"},
    ),
    Case(
        "the node's driver is older",
        "PyTorch",
        "environment",
        (7,),
        {"rank 7": _TRACE + "RuntimeError: The NVIDIA driver version is insufficient\n"},
    ),
    Case(
        "taken away by Slurm",
        "Slurm; NVRx 1",
        "taken away",
        (),
        {
            "node": "slurmstepd: error: *** STEP 9.0 ON n1 CANCELLED AT 2026-11-29T10:20:00 DUE TO "
            "PREEMPTION ***\n",
            "rank 0": "[E1129 10:20:02.0 a.py:1] SignalException: Process got signal: 15\n",
        },
    ),
    Case(
        "not all come to the store",
        "PyTorch, TCPStore; NVRx 12",
        "not all came",
        (),
        {"rank 0": _TRACE + "torch.distributed.DistStoreError: Timed out: 3/4 clients joined.\n"},
    ),
    Case(
        "a gradient is not finite",
        "NVRx 27; ByteRobust",
        "not finite",
        (1,),
        {"rank 1": "2026-11-29 10:20:00,5 ERROR found NaN in local grad norm, iteration 30\n"},
    ),
    Case(
        "a card that cannot reach its peer",
        "NVIDIA/nccl-tests#185",
        "link fault",
        (),
        {"node": "a:1:2 [0] ibvwrap.cc:1 NCCL WARN Call to ibv_modify_qp failed with error No way"},
    ),
    Case(
        "ranks of MPI's launcher",
        "NVIDIA/nccl#230",
        "link fault",
        (12,),
        {
            "node": "2019-06-02T16:13:44.8Z: [1,12]<stdout>:c:8:8 NCCL WARN NET/IB : Got async "
            "event : local catastrophic error\n2019-06-02T16:13:44.9Z: [1,14]<stdout>:c: NCCL WARN "
            "NET/IB : Got async event : local catastrophic error\n"
        },
    ),
    Case(
        "ended by a signal of C, where steps count their nan",
        "NVIDIA/Megatron-LM#1880",
        "native crash",
        (0,),
        {
            "node": " lm loss: 1.4E+00 | grad norm: 13.6 | number of nan iterations: 0 |\n"
            "E1223 05:18:02.9 33 api.py:882] failed (exitcode: -11) local_rank: 0 (pid: 3304209)\n"
        },
    ),
    Case(
        "a prefix of a launcher before one of PyTorch",
        "pytorch/pytorch#113128",
        "device fault",
        (12,),
        {"node": "[default0]:[rank12]:[E817 17:40:34.2 P.cpp:1] uncorrectable ECC error\n"},
    ),
    Case(
        "a library of the device",
        "haochen-rye/NeRV#1",
        "device program",
        (0,),
        {"rank 0": _TRACE + "RuntimeError: CUDA error: CUBLAS_STATUS_INTERNAL_ERROR\n"},
    ),
    Case(
        "no failure",
        "a healthy log",
        "",
        (),
        {"rank 0": "2026-11-29 10:20:00,5 INFO step 30 loss 2.31 norm 0.5\nUserWarning: old\n"},
    ),
)
