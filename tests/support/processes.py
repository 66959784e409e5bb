"""Programs that start in a moment: forked from a process that has imported torch and transformers, and nothing of ours.

Importing those takes longer than most runs of the tests. A program has a process, an environment and a working folder
of its own, and imports kvbench itself; its exit status, its pipes and signals are those of ``subprocess``. Where the
imports or the interpreter are what is tested, ``subprocess`` starts it.
"""

from __future__ import annotations

import array
import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from importlib import import_module

PRELOADED = (
    "hydra",
    "jinja2",
    "numpy",
    "omegaconf",
    "rapidfuzz.fuzz",
    "rapidfuzz.process",
    "rich.progress",
    "rich.table",
    "scipy.optimize",
    "scipy.special",
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "transformers",
    "transformers.conversion_mapping",
    "transformers.loss.loss_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)
"""What a run imports of other packages. A name that a release does not have is left out."""


class Program:
    """A running program, with what the tests use of ``subprocess.Popen``. Its output is text."""

    def __init__(self, arguments, code="", env=None, cwd=None):
        out, err = os.pipe(), os.pipe()
        where = {"arguments": [*map(str, arguments)], "code": code, "cwd": str(cwd or os.getcwd())}
        asked = {**where, "env": dict(os.environ if env is None else env)}
        self.pid = _ask(asked, (out[1], err[1]))
        os.close(out[1])
        os.close(err[1])
        self.stdout, self.stderr = (os.fdopen(end, encoding="utf-8") for end in (out[0], err[0]))
        self.returncode = None

    def status(self):
        """Return the exit status, "stopped" of a program that has just stopped, or None while it runs."""
        if self.returncode is None:
            found = _ask({"status": self.pid})
            if isinstance(found, str):
                return found
            self.returncode = found
        return self.returncode

    def poll(self):
        self.status()
        return self.returncode

    def wait(self, timeout=240):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=240):
        """Wait for the end; return (standard output, standard error)."""
        # the two pipes are read at once, as a full one would stop the program
        read = subprocess.Popen.communicate
        like = _Ended(self)
        out, err = read(like, timeout=timeout)
        self.wait(timeout)
        return out, err

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stdout.close()
        self.stderr.close()
        self.wait()


class _Ended(subprocess.Popen):
    """A Popen of pipes alone, so that its way of reading two of them can be used."""

    def __init__(self, program):
        self.args, self.stdin, self.stdout, self.stderr = str(program.pid), None, program.stdout, program.stderr
        self.pid, self.returncode, self.program = program.pid, None, program
        self._communication_started, self._input, self.text_mode, self.encoding = False, None, True, "utf-8"
        self.errors, self._waitpid_lock = None, None

    def wait(self, timeout=None):
        self.returncode = self.program.wait(240 if timeout is None else timeout)
        return self.returncode

    def poll(self):
        return self.program.poll()

    def __del__(self):
        pass


def start(*arguments, env=None, cwd=None):
    """Start ``python -m kvbench`` with the arguments."""
    return Program(arguments, env=env, cwd=cwd)


def start_code(code, *arguments, env=None, cwd=None):
    """Start ``python -c code`` with the arguments."""
    return Program(arguments, code, env=env, cwd=cwd)


SCRIPT = """
import runpy, sys
from pathlib import Path
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_script(path, *arguments, env=None, timeout=240):
    """Run ``python path`` with the arguments to its end, as ``run`` does."""
    return _finish(start_code(SCRIPT, path, *arguments, env=env), [path, *arguments], timeout)


STOPPING = """
import os, signal, sys
from kvbench.cli.main import main
from kvbench.store.store import Writer

append, answers_left = Writer.append, [int(sys.argv[1])]

def appending(writer, sample):
    append(writer, sample)
    answers_left[0] -= 1
    if not answers_left[0]:
        os.kill(os.getpid(), signal.SIGSTOP)

Writer.append = appending
sys.exit(main(["run", *sys.argv[2:]]))
"""
"""A run that stops, as by SIGSTOP from outside, when it has stored as many answers as its first argument says."""


def start_until(answers, *arguments):
    """Start a run and return it once it has stopped, with its locks, behind as many answers; SIGCONT has it go on."""
    run = start_code(STOPPING, str(answers), *arguments)
    while (status := run.status()) is None:
        time.sleep(0.005)
    assert status == "stopped", run.communicate()
    return run


def run(*arguments, env=None, cwd=None, timeout=240):
    """Run ``python -m kvbench`` to its end, as ``subprocess.run`` does with ``capture_output`` and ``text``."""
    return _finish(start(*arguments, env=env, cwd=cwd), arguments, timeout)


def _finish(program, arguments, timeout):
    """Wait for a program's end. Return its status and output."""
    try:
        out, err = program.communicate(timeout)
    except BaseException:
        program.kill()
        raise
    return subprocess.CompletedProcess([*arguments], program.returncode, out, err)


@cache
def _server(_of):
    """The socket to the process that forks; there is one for each process that asks."""
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(theirs.fileno())]
    # pipes, as every program writes to pipes: Python looks at its start what they are
    ends = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, **ends)
    theirs.close()

    def close():
        ours.close()
        process.wait()

    atexit.register(close)
    return ours


def _ask(question, descriptors=()):
    server = _server(os.getpid())
    content = json.dumps(question).encode()
    sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    server.sendmsg([len(content).to_bytes(4, "big")], sent)
    server.sendall(content)
    (answer,) = json.loads(_received(server, int.from_bytes(_received(server, 4), "big")))
    return answer


def _received(connection, size):
    content = b""
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            raise EOFError
        content += part
    return content


def _serve(connection):
    """Answer until the tests end. In each forked process, return what it is to run."""
    while True:
        head, rights, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(8))
        if not head:
            os._exit(0)
        question = json.loads(_received(connection, int.from_bytes(head, "big")))
        if "status" in question:
            answer = _status_of(question["status"])
        else:
            descriptors = array.array("i", rights[0][2])
            answer = os.fork()
            if not answer:
                connection.close()
                for end, fd in enumerate(descriptors, 1):
                    os.dup2(fd, end)
                    os.close(fd)
                return question
            for fd in descriptors:
                os.close(fd)
        content = json.dumps([answer]).encode()
        connection.sendall(len(content).to_bytes(4, "big") + content)


def _status_of(pid):
    found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
    if not found:
        return None
    return "stopped" if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)


def _main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the tests
    for name in PRELOADED:
        try:
            import_module(name)
        except ImportError:
            continue
    gc.freeze()  # a program that collects would go through all of this
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    # as Python does: the working folder, PYTHONPATH, and then its own
    folders = filter(None, asked["env"].get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = dict.fromkeys([asked["cwd"], *folders])
    return asked


if __name__ == "__main__":
    _asked = _main()
    if _asked["code"]:
        sys.argv = ["-c", *_asked["arguments"]]
        exec(compile(_asked["code"], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = ["kvbench", *_asked["arguments"]]
        runpy.run_module("kvbench", run_name="__main__", alter_sys=True)
