"""Chromium, driven by its own protocol through a pipe, for tests of pages."""

import json
import os
import shutil
import subprocess
import time

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium():
    """The program; without one a test is skipped, or fails in CI."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        assert os.environ.get("CI") != "true", "CI has to look at the page: install chromium"
        pytest.skip("there is no Chromium to look at the page with")
    return program


class Browser:
    """One page in Chromium without a window; everything but this machine is unreachable.

    Args:
        folder: for its profile.
    """

    def __init__(self, folder):
        to_read, self.to_write = os.pipe()
        self.to_read, to_answer = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        flags += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={folder}"]
        # The protocol reads from descriptor 3 and writes to descriptor 4.
        command = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_answer}', "bash", find_chromium(), *flags]
        self.process = subprocess.Popen(
            command, pass_fds=(to_read, to_answer), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_answer)
        self.number, self.session, self.rest = 0, None, b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("DOM.enable")

    def call(self, method, **parameters):
        """The result of a call of the protocol."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.to_write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self):
        while b"\0" not in self.rest:
            part = os.read(self.to_read, 1 << 16)
            assert part, "Chromium has ended"
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def evaluate(self, expression):
        """The value of an expression of JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression, seconds=30):
        """The value of an expression as soon as it is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = self.evaluate(expression)
            if value:
                return value
            time.sleep(0.1)
        raise AssertionError(
            f"after {seconds} seconds: {expression}; the page: {self.evaluate('document.body.innerText')}"
        )

    def open(self, url, width=1000, height=900, dark=False):
        """Open a page in a window of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)

    def choose_file(self, selector, path):
        """Choose a file in the input that this selector finds."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def close(self):
        """End Chromium."""
        self.process.kill()
        self.process.wait()
        os.close(self.to_write)
        os.close(self.to_read)
