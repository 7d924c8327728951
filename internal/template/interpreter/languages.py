"""What the server has to know of each language: its kernel, and how environment variables are set."""
import json
import os
import shlex
import shutil
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


class Language:
    """A language with its Jupyter kernel. The methods return code of that language."""

    # Jupyter's interrupt_mode: a signal to the process, or a message on the control channel.
    interrupt_by_message = False
    env = {}

    def installed(self):
        return True

    def command(self, connection):
        """The kernel's command, with the file that says where it is to listen."""
        raise NotImplementedError

    def prepare(self):
        """Run once in each new kernel."""
        return ""

    def set_env(self, values):
        """Sets variables, and removes those whose value is None."""
        raise NotImplementedError


class Python(Language):
    def command(self, connection):
        return [sys.executable, os.path.join(HERE, "ipython_kernel.py"), "-f", connection]

    def prepare(self):
        # What started before the sandbox was copied has the state of the others' generators.
        return (
            "import sys as _s, random as _r\n"
            "_r.seed()\n"
            "if 'numpy.random' in _s.modules: _s.modules['numpy.random'].seed()\n"
            "del _s, _r"
        )

    def set_env(self, values):
        return (
            "import os as _o\n"
            f"for _k, _v in {values!r}.items():\n"
            "    if _v is None: _o.environ.pop(_k, None)\n"
            "    else: _o.environ[_k] = _v\n"
            "del _o, _k, _v"
        )


class JavaScript(Language):
    interrupt_by_message = True
    env = {
        "NO_COLOR": "1",
        "DENO_NO_UPDATE_CHECK": "1",
        "DENO_UNSTABLE_BARE_NODE_BUILTINS": "true",
        "DENO_UNSTABLE_SLOPPY_IMPORTS": "true",
    }

    def installed(self):
        return shutil.which("deno") is not None

    def command(self, connection):
        return ["deno", "jupyter", "--kernel", "--conn", connection]

    def prepare(self):
        return 'globalThis.require = (await import("node:module")).createRequire(process.cwd() + "/");'

    def set_env(self, values):
        return "".join(
            f"delete process.env[{json.dumps(k)}];" if v is None else f"process.env[{json.dumps(k)}] = {json.dumps(v)};"
            for k, v in values.items()
        ) + "undefined"


class Bash(Language):
    def command(self, connection):
        return [sys.executable, "-m", "bash_kernel", "-f", connection]

    def set_env(self, values):
        return "\n".join(f"unset {k}" if v is None else f"export {k}={shlex.quote(v)}" for k, v in values.items())


class R(Language):
    def installed(self):
        return shutil.which("R") is not None

    def command(self, connection):
        return ["R", "--slave", "-e", "IRkernel::main()", "--args", connection]

    def set_env(self, values):
        # R takes the escapes of JSON in its strings.
        return "\n".join(
            f"Sys.unsetenv({json.dumps(k)})" if v is None else f"Sys.setenv({k} = {json.dumps(v)})" for k, v in values.items()
        )


class Java(Language):
    interrupt_by_message = True
    jar = os.path.join(sys.prefix, "local/share/jupyter/kernels/java/jjava.jar")

    def installed(self):
        return shutil.which("java") is not None and os.path.exists(self.jar)

    def command(self, connection):
        # These kernels live in small sandboxes: little memory and a quick start before peak speed.
        # The kernel looks into a module of the compiler's that is closed by default.
        return ["java", "--add-opens=jdk.jshell/jdk.jshell=ALL-UNNAMED", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
                "-jar", self.jar, connection]

    def set_env(self, values):
        # A Java program cannot change its environment: they are system properties, as with E2B.
        return "\n".join(
            f"System.clearProperty({json.dumps(k)});" if v is None else f"System.setProperty({json.dumps(k)}, {json.dumps(v)});"
            for k, v in values.items()
        )


ALL = {
    "python": Python(),
    "javascript": JavaScript(),
    "typescript": JavaScript(),
    "bash": Bash(),
    "r": R(),
    "java": Java(),
}
ALIASES = {"js": "javascript", "ts": "typescript", "py": "python", "sh": "bash"}


def normal(name):
    """The name under which a language is known, whatever a client calls it."""
    name = name.strip().lower()
    return ALIASES.get(name, name)
