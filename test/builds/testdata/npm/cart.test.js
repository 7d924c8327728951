import assert from "node:assert";
import { execFileSync } from "node:child_process";
import { createServer } from "node:http";
import test from "node:test";
import semver from "semver";

test("a dependency", () => assert.equal(semver.inc("1.2.3", "minor"), "1.3.0"));

test("a program of a dependency", () =>
  assert.equal(execFileSync("node_modules/.bin/semver", ["1.2.3", "-i"], { encoding: "utf8" }), "1.2.4\n"));

test("a server on loopback", async () => {
  const server = createServer((_, response) => response.end("ok")).listen(0, "127.0.0.1");
  await new Promise((resolve) => server.on("listening", resolve));
  const response = await fetch(`http://127.0.0.1:${server.address().port}/`);
  assert.equal(await response.text(), "ok");
  server.close();
  server.closeAllConnections();
});
