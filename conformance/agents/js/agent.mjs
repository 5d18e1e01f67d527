// Drives the official JavaScript SDK by JSON lines; the protocol is told in ../python_agent.py.

import { createInterface } from "node:readline";
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { ConnectionConfig, Sandbox, SandboxException, SandboxManager } from "@alibaba-group/opensandbox";

const sandboxes = new Map();
const configs = new Map();

const given = (options) => Object.fromEntries(Object.entries(options).filter(([, value]) => value != null));
const moment = (value) => value?.toISOString() ?? null;

function config(connection) {
  const key = JSON.stringify(connection);
  if (!configs.has(key)) {
    configs.set(
      key,
      new ConnectionConfig(
        given({
          domain: connection.domain,
          apiKey: connection.api_key,
          headers: connection.headers,
          requestTimeoutSeconds: connection.request_timeout,
          useServerProxy: connection.use_server_proxy,
        }),
      ),
    );
  }
  return configs.get(key);
}

async function manager(connection, call) {
  const made = SandboxManager.create({ connectionConfig: config(connection) });
  try {
    return await call(made);
  } finally {
    await made.close();
  }
}

function info(value) {
  return {
    id: value.id,
    state: value.status.state,
    reason: value.status.reason ?? null,
    message: value.status.message ?? null,
    image: value.image?.uri ?? null,
    entrypoint: value.entrypoint,
    metadata: value.metadata ?? {},
    extensions: value.extensions ?? {},
    created_at: moment(value.createdAt),
    expires_at: moment(value.expiresAt),
  };
}

function entry(value) {
  return {
    path: value.path,
    type: value.type ?? null,
    mode: value.mode,
    owner: value.owner,
    group: value.group,
    size: value.size,
    modified_at: moment(value.modifiedAt),
  };
}

const commands = (args) => sandboxes.get(args.id).commands;
const files = (args) => sandboxes.get(args.id).files;

/** A command that was run to its end. */
function ran(run, arrivals) {
  const { name, value, traceback } = run.error ?? {};
  return {
    id: run.id,
    stdout: run.logs.stdout.map((message) => message.text),
    stderr: run.logs.stderr.map((message) => message.text),
    text: null,
    exit_code: run.exitCode ?? null,
    error: run.error ? { name, value, traceback } : null,
    complete: run.complete != null,
    arrivals,
  };
}

const operations = {
  async create(c, { image, timeout = 600, manual, ready_timeout, secure_access, skip_health_check, ...options }) {
    const sandbox = await Sandbox.create({
      connectionConfig: config(c),
      image,
      timeoutSeconds: manual ? null : timeout,
      ...given({ readyTimeoutSeconds: ready_timeout, secureAccess: secure_access, skipHealthCheck: skip_health_check }),
      ...given(options),
    });
    sandboxes.set(sandbox.id, sandbox);
    return sandbox.id;
  },
  async connect(c, { id }) {
    sandboxes.set(id, await Sandbox.connect({ connectionConfig: config(c), sandboxId: id }));
  },
  close: (c, { id }) => sandboxes.get(id).close(),
  kill: (c, { id }) => (sandboxes.has(id) ? sandboxes.get(id).kill() : manager(c, (made) => made.killSandbox(id))),
  info: async (c, { id }) =>
    info(sandboxes.has(id) ? await sandboxes.get(id).getInfo() : await manager(c, (made) => made.getSandboxInfo(id))),
  async list(c, { states, metadata, page, page_size }) {
    const found = await manager(c, (made) =>
      made.listSandboxInfos(given({ states, metadata, page, pageSize: page_size })),
    );
    const { page: at, pageSize, totalItems, totalPages, hasNextPage } = found.pagination;
    return {
      items: found.items.map(info),
      pagination: {
        page: at,
        page_size: pageSize,
        total_items: totalItems,
        total_pages: totalPages,
        has_next_page: hasNextPage,
      },
    };
  },
  renew: async (c, { id, timeout }) => moment((await sandboxes.get(id).renew(timeout)).expiresAt),
  patch_metadata: async (c, { id, patch }) => (await sandboxes.get(id).patchMetadata(patch)).metadata ?? {},
  pause: (c, { id }) => sandboxes.get(id).pause(),
  snapshot: (c, { id }) => manager(c, (made) => made.createSnapshot(id, { name: "named" })),
  async endpoint(c, { id, port }) {
    const found = await sandboxes.get(id).getEndpoint(port);
    return { endpoint: found.endpoint, headers: found.headers ?? {} };
  },
  signed_endpoint: async (c, { id, port, expires }) => (await sandboxes.get(id).getSignedEndpoint(port, expires)).endpoint,
  healthy: (c, { id }) => sandboxes.get(id).isHealthy(),
  async metrics(c, { id }) {
    const found = await sandboxes.get(id).getMetrics();
    return {
      cpu_count: found.cpuCount,
      cpu_percent: found.cpuUsedPercentage,
      memory_total: found.memoryTotalMiB,
      memory_used: found.memoryUsedMiB,
      timestamp: found.timestamp,
    };
  },
  async run(c, { id, command, cwd, env, timeout, uid, gid, interrupt_at_init }) {
    const began = performance.now();
    const arrivals = [];
    const handlers = { onStdout: () => void arrivals.push((performance.now() - began) / 1000) };
    if (interrupt_at_init) handlers.onInit = (init) => commands({ id }).interrupt(init.id);
    const opts = given({ workingDirectory: cwd, envs: env, timeoutSeconds: timeout, uid, gid });
    const run = await commands({ id }).run(command, opts, handlers);
    return ran(run, arrivals);
  },
  open_session: (c, { id, cwd }) => commands({ id }).createSession(given({ workingDirectory: cwd })),
  async run_in_session(c, { id, session, command, cwd, timeout }) {
    const opts = given({ workingDirectory: cwd, timeoutSeconds: timeout });
    return ran(await commands({ id }).runInSession(session, command, opts), []);
  },
  delete_session: (c, { id, session }) => commands({ id }).deleteSession(session),
  start: async (c, { id, command }) => (await commands({ id }).run(command, { background: true })).id,
  async status(c, { id, execution }) {
    const found = await commands({ id }).getCommandStatus(execution);
    return {
      running: found.running,
      exit_code: found.exitCode ?? null,
      content: found.content,
      finished: found.finishedAt != null,
    };
  },
  async logs(c, { id, execution, cursor }) {
    const found = await commands({ id }).getBackgroundCommandLogs(execution, cursor ?? undefined);
    return { content: found.content, cursor: found.cursor };
  },
  interrupt: (c, { id, execution }) => commands({ id }).interrupt(execution),
  write: (c, { id, files: entries }) =>
    files({ id }).writeFiles(entries.map((file) => ({ ...file, data: Buffer.from(file.data, "base64") }))),
  read: (c, { id, path, ...options }) => files({ id }).readFile(path, given(options)),
  read_bytes: async (c, { id, path }) => Buffer.from(await files({ id }).readBytes(path)).toString("base64"),
  async stream(c, { id, path }) {
    let total = 0;
    for await (const chunk of files({ id }).readBytesStream(path)) total += chunk.length;
    return total;
  },
  async stat(c, { id, paths }) {
    const found = await files({ id }).getFileInfo(paths);
    return Object.fromEntries(Object.entries(found).map(([path, value]) => [path, entry(value)]));
  },
  search: async (c, { id, path, pattern }) => (await files({ id }).search({ path, pattern })).map((item) => item.path),
  list_directory: async (c, { id, path, depth }) =>
    (await files({ id }).listDirectory(given({ path, depth }))).map(entry),
  mkdir: (c, { id, paths, mode }) => files({ id }).createDirectories(paths.map((path) => given({ path, mode }))),
  rmdir: (c, { id, paths }) => files({ id }).deleteDirectories(paths),
  delete: (c, { id, paths }) => files({ id }).deleteFiles(paths),
  move: (c, { id, source, destination }) => files({ id }).moveFiles([{ src: source, dest: destination }]),
  chmod: (c, { id, path, ...options }) => files({ id }).setPermissions([{ path, ...given(options) }]),
  async replace(c, { id, path, old, new: fresh, count }) {
    const asked = [{ path, oldContent: old, newContent: fresh }];
    if (!count) return void (await files({ id }).replaceContents(asked));
    return (await files({ id }).replaceContentsDetailed(asked))[0].replacedCount;
  },
};

const options = [
  ...["api_key", "headers", "request_timeout", "use_server_proxy"].map((name) => `connection.${name}`),
  ...["entrypoint", "env", "extensions", "manual", "metadata", "platform", "ready_timeout", "resource"].map(
    (name) => `create.${name}`,
  ),
  ...["secure_access", "skip_health_check", "timeout", "volumes"].map((name) => `create.${name}`),
  ...["arrivals", "cwd", "env", "exact", "interrupt_at_init", "timeout", "uid"].map((name) => `run.${name}`),
  ...["chmod.owner", "list.page", "read.lines", "read.range", "replace.count", "write.bytes", "write.many", "write.owner"],
];

function problem(error) {
  if (!(error instanceof SandboxException)) return { kind: error.name, message: error.message };
  return {
    kind: error.name,
    bases: ["SandboxException"],
    status: error.statusCode ?? null,
    code: error.error.code,
    message: error.error.message ?? error.message,
    body: typeof error.rawBody === "string" ? error.rawBody : JSON.stringify(error.rawBody ?? ""),
    request_id: error.requestId ?? null,
  };
}

const say = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);

async function serve({ id, op, connection, args }) {
  try {
    say({ id, ok: (await operations[op](connection, args)) ?? null });
  } catch (error) {
    say({ id, error: problem(error) });
  }
}

const entrance = createRequire(import.meta.url).resolve("@alibaba-group/opensandbox");
const packageDirectory = entrance.slice(0, entrance.lastIndexOf(join("opensandbox", "dist")) + "opensandbox".length);
const { version } = JSON.parse(readFileSync(join(packageDirectory, "package.json")));
say({ version, features: [...Object.keys(operations), ...options].sort() });
const lines = createInterface({ input: process.stdin });
lines.on("line", (line) => void serve(JSON.parse(line)));
lines.on("close", () => process.exit());
