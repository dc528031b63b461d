// A client of Shoal's coordinator in JavaScript: it creates a job, joins it as its only member, and
// reads the job's events.
//
//     npm ci
//     node client.js HOST:PORT ../../protos
//
// Methods and messages come from the .proto files, which document them. If the cluster uses tokens,
// SHOAL_TOKEN is sent with each call. Members can be written in this way in any language that has
// gRPC. How their ranks communicate is up to them.

const { parseArgs } = require("node:util");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const protobuf = require("protobufjs");

const { positionals } = parseArgs({ allowPositionals: true });
const [address, protos] = positionals;
if (address === undefined || protos === undefined) {
  console.error("usage: node client.js HOST:PORT DIRECTORY_OF_THE_PROTOS");
  process.exit(2);
}

const definition = loader.loadSync("shoal_protos/v1/coordinator.proto", {
  includeDirs: [protos],
  keepCase: true,
  longs: String,
  enums: String,
  oneofs: true,
  defaults: true,
});
const shoal = grpc.loadPackageDefinition(definition).shoal.v1;
const coordinator = new shoal.Coordinator(address, grpc.credentials.createInsecure());
const metadata = new grpc.Metadata();
if (process.env.SHOAL_TOKEN) metadata.set("authorization", `Bearer ${process.env.SHOAL_TOKEN}`);

// Errors contain a google.rpc.Status with an ErrorInfo, whose reason is meant for programs.
const Any = new protobuf.Type("Any").add(new protobuf.Field("type_url", 1, "string")).add(new protobuf.Field("value", 2, "bytes"));
const Status = new protobuf.Type("Status").add(new protobuf.Field("details", 3, "Any", "repeated")).add(Any);
const ErrorInfo = new protobuf.Type("ErrorInfo").add(new protobuf.Field("reason", 1, "string"));

function reasonOf(error) {
  const [encoded] = error.metadata.get("grpc-status-details-bin");
  const found = Status.decode(encoded).details.find((detail) => detail.type_url.endsWith("google.rpc.ErrorInfo"));
  return ErrorInfo.decode(found.value).reason;
}

function call(method, request) {
  return new Promise((resolve, reject) => {
    const options = { deadline: Date.now() + 30_000 };
    coordinator[method](request, metadata, options, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

function beMember(jobId, memberId) {
  return new Promise((resolve, reject) => {
    const session = coordinator.JoinSession(metadata);
    let beats;
    session.on("data", ({ directive, welcome, generation, rank }) => {
      if (directive === "welcome") {
        let number = "0";
        beats = setInterval(() => session.write({ heartbeat: { generation: number } }), Number(welcome.heartbeat_interval_ms));
        session.write({ ready: {} });
      } else if (directive === "generation") {
        console.log(`generation ${generation.number}: rank ${rank} of ${generation.world_size}`);
        session.write({ heartbeat: { generation: generation.number } });
        session.write({ leave: { reason: "REASON_FINISHED" } });
        session.end();
      }
    });
    session.on("error", reject);
    session.on("end", resolve);
    session.on("close", () => clearInterval(beats));
    session.write({ join: { job_id: jobId, member_id: memberId, host: "elsewhere", pid: process.pid } });
  });
}

function events(jobId) {
  return new Promise((resolve, reject) => {
    const found = [];
    const stream = coordinator.WatchEvents({ job_id: jobId }, metadata, { deadline: Date.now() + 30_000 });
    stream.on("data", (event) => found.push(event));
    stream.on("error", reject);
    stream.on("end", () => resolve(found));
  });
}

async function main() {
  const job_id = "from-javascript";
  const { created } = await call("CreateJob", { spec: { job_id, min_workers: 1, max_workers: 1 } });
  console.log(`created: ${created}`);
  await call("CreateJob", { spec: { job_id: "none", min_workers: 3, max_workers: 2 } }).catch((error) => {
    console.log(`refused: ${grpc.status[error.code]} / ${reasonOf(error)}: ${error.details}`);
  });
  await beMember(job_id, "member-of-node");
  const { phase } = await call("GetJob", { job_id });
  console.log(`phase: ${phase}`);
  for (const { kind, member_id } of await events(job_id)) console.log(`event: ${kind} ${member_id}`.trim());
  coordinator.close();
}

main();
