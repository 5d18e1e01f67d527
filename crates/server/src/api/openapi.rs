//! The OpenAPI document: operations from one table, schemas from the wire types.

use osb_protocol::error::ErrorBody;
use osb_protocol::lifecycle as wire;
use utoipa::openapi::path::{OperationBuilder, ParameterBuilder, ParameterIn};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::response::ResponseBuilder;
use utoipa::openapi::schema::{
    AdditionalProperties, ArrayBuilder, ComponentsBuilder, ObjectBuilder, SchemaType, Type,
};
use utoipa::openapi::security::{ApiKey, ApiKeyValue, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    Content, HttpMethod, InfoBuilder, OpenApi, OpenApiBuilder, PathItem, PathsBuilder, Ref, RefOr, Required,
    Schema, Server,
};

use utoipa::ToSchema;

use HttpMethod::{Delete, Get, Patch, Post, Put};

/// One operation.
struct Operation {
    method: HttpMethod,
    path: &'static str,
    id: &'static str,
    query: &'static [Parameter],
    /// Besides the request id.
    headers: &'static [&'static str],
    /// Schema of the body, and whether a body must be sent.
    body: Option<(Body, bool)>,
    ok: (u16, Answer),
    errors: &'static [u16],
}

enum Body {
    Of(&'static str),
    ListOf(&'static str),
    Texts,
    Anything,
}

enum Answer {
    Anything,
    Of(&'static str),
    Text,
    OfOrText(&'static str),
    Nothing,
}

#[derive(Clone, Copy)]
enum Parameter {
    Text(&'static str),
    Texts(&'static str),
    Flag(&'static str),
    /// Name, least, most, default.
    Int(&'static str, u64, u64, Option<u64>),
}

use Parameter::{Flag, Int, Text, Texts};

const PAGE: Parameter = Int("page", 1, u64::MAX, Some(1));
const PAGE_SIZE: Parameter =
    Int("pageSize", 1, wire::MAX_PAGE_SIZE as u64, Some(wire::DEFAULT_PAGE_SIZE as u64));

const CHANGE: &[u16] = &[400, 401, 403, 404, 409, 422, 500, 503];
const DIAGNOSTICS: &[u16] = &[400, 401, 403, 404, 422, 500, 501, 503];
const POLICY: &[u16] = &[400, 401, 403, 404, 409, 422, 500, 502, 503, 504];
const PROXY: &[u16] = &[400, 401, 404, 422, 500, 502, 503, 504];
const ONE: &[u16] = &[401, 404, 422, 500, 501, 503];
const SNAPSHOT: &[u16] = &[401, 403, 404, 409, 422, 500, 501, 503];

const fn operation(
    method: HttpMethod,
    path: &'static str,
    id: &'static str,
    ok: (u16, Answer),
    errors: &'static [u16],
) -> Operation {
    Operation { method, path, id, query: &[], headers: &[], body: None, ok, errors }
}

impl Operation {
    const fn query(mut self, query: &'static [Parameter]) -> Self {
        self.query = query;
        self
    }

    const fn body(mut self, body: Body) -> Self {
        self.body = Some((body, true));
        self
    }
}

#[rustfmt::skip]
fn operations() -> Vec<Operation> {
    let mut list = vec![
        operation(Get, "/sandboxes", "listSandboxes", (200, Answer::Of("ListSandboxesResponse")), &[400, 401, 422, 500, 503])
            .query(&[Texts("state"), Text("metadata"), PAGE, PAGE_SIZE]),
        operation(Post, "/sandboxes", "createSandbox", (202, Answer::Of("CreateSandboxResponse")), &[400, 401, 403, 404, 409, 422, 429, 500, 503, 504])
            .body(Body::Of("CreateSandboxRequest")),
        operation(Get, "/sandboxes/{sandboxId}", "getSandbox", (200, Answer::Of("Sandbox")), &[401, 403, 404, 422, 500, 503]),
        operation(Delete, "/sandboxes/{sandboxId}", "deleteSandbox", (204, Answer::Nothing), &[401, 403, 404, 409, 422, 500, 503]),
        operation(Patch, "/sandboxes/{sandboxId}/metadata", "patchSandboxMetadata", (200, Answer::Of("Sandbox")), CHANGE)
            .body(Body::Of("PatchSandboxMetadataRequest")),
        operation(Post, "/sandboxes/{sandboxId}/pause", "pauseSandbox", (202, Answer::Nothing), CHANGE),
        operation(Post, "/sandboxes/{sandboxId}/resume", "resumeSandbox", (202, Answer::Nothing), CHANGE),
        operation(Post, "/sandboxes/{sandboxId}/renew-expiration", "renewSandboxExpiration", (200, Answer::Of("RenewSandboxExpirationResponse")), CHANGE)
            .body(Body::Of("RenewSandboxExpirationRequest")),
        operation(Get, "/snapshots", "listSnapshots", (200, Answer::Of("ListSnapshotsResponse")), &[400, 401, 422, 500, 501, 503])
            .query(&[Text("sandboxId"), Text("name"), Texts("state"), PAGE, PAGE_SIZE]),
        operation(Get, "/snapshots/{snapshotId}", "getSnapshot", (200, Answer::Of("Snapshot")), SNAPSHOT),
        operation(Delete, "/snapshots/{snapshotId}", "deleteSnapshot", (204, Answer::Nothing), SNAPSHOT),
        operation(Get, "/sandboxes/{sandboxId}/endpoints/{port}", "getSandboxEndpoint", (200, Answer::Of("Endpoint")), &[400, 401, 403, 404, 422, 500, 503])
            .query(&[Flag("use_server_proxy"), Int("expires", 0, u64::MAX, None)]),
        operation(Get, "/sandboxes/{sandboxId}/networkpolicy", "getSandboxNetworkPolicy", (200, Answer::Of("PolicyStatusResponse")), POLICY),
        operation(Put, "/sandboxes/{sandboxId}/networkpolicy", "replaceSandboxNetworkPolicy", (200, Answer::Of("PolicyStatusResponse")), POLICY)
            .body(Body::Of("NetworkPolicy")),
        operation(Patch, "/sandboxes/{sandboxId}/networkpolicy", "patchSandboxNetworkPolicy", (200, Answer::Of("PolicyStatusResponse")), POLICY)
            .body(Body::ListOf("NetworkRule")),
        operation(Delete, "/sandboxes/{sandboxId}/networkpolicy", "deleteSandboxNetworkPolicyRules", (200, Answer::Of("PolicyStatusResponse")), POLICY)
            .body(Body::Texts),
        operation(Get, "/sandboxes/{sandboxId}/diagnostics/logs", "getLogsDiagnostics", (200, Answer::OfOrText("DiagnosticContentResponse")), DIAGNOSTICS)
            .query(&[Text("scope"), Int("tail", 1, 10_000, Some(100)), Text("since"), Text("container")]),
        operation(Get, "/sandboxes/{sandboxId}/diagnostics/events", "getEventsDiagnostics", (200, Answer::OfOrText("DiagnosticContentResponse")), DIAGNOSTICS)
            .query(&[Text("scope"), Int("limit", 1, 500, Some(50))]),
        operation(Get, "/sandboxes/{sandboxId}/diagnostics/inspect", "getInspectDiagnostics", (200, Answer::Text), DIAGNOSTICS),
        operation(Get, "/sandboxes/{sandboxId}/diagnostics/summary", "getSummaryDiagnostics", (200, Answer::Text), DIAGNOSTICS)
            .query(&[Int("tail", 1, 10_000, Some(50)), Int("event_limit", 1, 500, Some(20))]),
        operation(Post, "/pools", "createPool", (201, Answer::Of("PoolResponse")), &[400, 401, 409, 422, 500, 501, 503])
            .body(Body::Of("CreatePoolRequest")),
        operation(Get, "/pools", "listPools", (200, Answer::Of("ListPoolsResponse")), &[401, 422, 500, 501, 503]),
        operation(Get, "/pools/{poolName}", "getPool", (200, Answer::Of("PoolResponse")), ONE),
        operation(Put, "/pools/{poolName}", "updatePool", (200, Answer::Of("PoolResponse")), &[400, 401, 404, 422, 500, 501, 503])
            .body(Body::Of("UpdatePoolRequest")),
        operation(Delete, "/pools/{poolName}", "deletePool", (204, Answer::Nothing), ONE),
        operation(Post, "/templates", "createTemplate", (201, Answer::Of("FsbTemplate")), &[400, 401, 409, 422, 500, 501, 503])
            .body(Body::Of("CreateFsbTemplateRequest")),
        operation(Get, "/templates", "listTemplates", (200, Answer::Of("ListFsbTemplatesResponse")), &[400, 401, 422, 500, 501, 503])
            .query(&[PAGE, PAGE_SIZE, Text("metadata")]),
        operation(Get, "/templates/{templateId}", "getTemplate", (200, Answer::Of("FsbTemplate")), ONE),
        operation(Delete, "/templates/{templateId}", "deleteTemplate", (204, Answer::Nothing), ONE),
        operation(Post, "/metrics/events", "reportMetricsEvent", (204, Answer::Nothing), &[400, 401, 422, 500, 503])
            .body(Body::Of("MetricsEvent")),
        operation(Get, "/health", "health", (200, Answer::Of("HealthResponse")), &[]),
        operation(Get, "/version", "version", (200, Answer::Of("VersionResponse")), &[]),
    ];
    if let Some(metrics) = list.iter_mut().find(|operation| operation.path == "/metrics/events") {
        metrics.headers = &["User-Agent"];
    }
    let mut snapshot = operation(Post, "/sandboxes/{sandboxId}/snapshots", "createSnapshot", (202, Answer::Of("Snapshot")), &[400, 401, 403, 404, 409, 422, 500, 501, 503]);
    snapshot.body = Some((Body::Of("CreateSnapshotRequest"), false));
    list.push(snapshot);
    let root = "/sandboxes/{sandboxId}/proxy/{port}";
    let below = "/sandboxes/{sandboxId}/proxy/{port}/{fullPath}";
    for (method, root_id, below_id) in [
        (Get, "getSandboxProxyRoot", "getSandboxProxyPath"),
        (Post, "postSandboxProxyRoot", "postSandboxProxyPath"),
        (Put, "putSandboxProxyRoot", "putSandboxProxyPath"),
        (Patch, "patchSandboxProxyRoot", "patchSandboxProxyPath"),
        (Delete, "deleteSandboxProxyRoot", "deleteSandboxProxyPath"),
    ] {
        for (path, id) in [(root, root_id), (below, below_id)] {
            let mut proxied = operation(method.clone(), path, id, (200, Answer::Anything), PROXY);
            proxied.headers = &["OpenSandbox-Secure-Access", "OPENSANDBOX-EGRESS-AUTH", "OpenSandbox-Access-Renew"];
            if method != Get {
                proxied.body = Some((Body::Anything, false));
            }
            list.push(proxied);
        }
    }
    list
}

/// The document. Costs some hundred microseconds: the server makes it when it is first asked for.
#[must_use]
pub fn document() -> OpenApi {
    let mut paths = PathsBuilder::new();
    for operation in operations() {
        paths = paths.path(operation.path, path_item(operation));
    }
    let components = ComponentsBuilder::new()
        .schemas_from_iter(schemas())
        .schema("ValidationError", validation_error())
        .schema("HTTPValidationError", validation_body())
        .schema("FrameworkError", framework_error())
        .security_scheme(
            "apiKeyAuth",
            SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("OPEN-SANDBOX-API-KEY"))),
        )
        .build();
    OpenApiBuilder::new()
        .info(InfoBuilder::new().title("lifecycle").version(env!("CARGO_PKG_VERSION")).build())
        .servers(Some([Server::new("/v1"), Server::new("/")]))
        .security(Some([SecurityRequirement::new("apiKeyAuth", Vec::<String>::new())]))
        .paths(paths)
        .components(Some(components))
        .build()
}

/// The wire types and whatever they name.
fn schemas() -> Vec<(String, RefOr<Schema>)> {
    fn add<T: ToSchema>(list: &mut Vec<(String, RefOr<Schema>)>) {
        list.push((T::name().into_owned(), T::schema()));
        T::schemas(list);
    }
    let mut list = Vec::new();
    add::<wire::CreateSandboxRequest>(&mut list);
    add::<wire::CreateSandboxResponse>(&mut list);
    add::<wire::ListSandboxesResponse>(&mut list);
    add::<wire::Endpoint>(&mut list);
    add::<wire::PatchSandboxMetadataRequest>(&mut list);
    add::<wire::RenewSandboxExpirationRequest>(&mut list);
    add::<wire::RenewSandboxExpirationResponse>(&mut list);
    add::<wire::CreateSnapshotRequest>(&mut list);
    add::<wire::ListSnapshotsResponse>(&mut list);
    add::<wire::PolicyStatusResponse>(&mut list);
    add::<wire::DiagnosticContentResponse>(&mut list);
    add::<wire::CreatePoolRequest>(&mut list);
    add::<wire::UpdatePoolRequest>(&mut list);
    add::<wire::ListPoolsResponse>(&mut list);
    add::<wire::CreateFsbTemplateRequest>(&mut list);
    add::<wire::ListFsbTemplatesResponse>(&mut list);
    add::<wire::MetricsEvent>(&mut list);
    add::<wire::HealthResponse>(&mut list);
    add::<wire::VersionResponse>(&mut list);
    add::<ErrorBody>(&mut list);
    list
}

fn path_item(operation: Operation) -> PathItem {
    let mut built = OperationBuilder::new().operation_id(Some(operation.id)).tag(tag(operation.path));
    for name in operation.path.split(['{', '}']).skip(1).step_by(2) {
        let schema: RefOr<Schema> = if name == "port" { int(1, 65_535, None) } else { text() };
        built = built.parameter(
            ParameterBuilder::new()
                .name(name)
                .parameter_in(ParameterIn::Path)
                .required(Required::True)
                .schema(Some(schema)),
        );
    }
    for parameter in operation.query {
        built = built.parameter(query_parameter(*parameter));
    }
    for name in std::iter::once(&"X-Request-ID").chain(operation.headers) {
        built = built.parameter(
            ParameterBuilder::new()
                .name(*name)
                .parameter_in(ParameterIn::Header)
                .required(Required::False)
                .schema(Some(text())),
        );
    }
    if let Some((body, required)) = operation.body {
        let (kind, schema) = match body {
            Body::Of(name) => ("application/json", reference(name)),
            Body::ListOf(name) => {
                ("application/json", ArrayBuilder::new().items(reference(name)).build().into())
            }
            Body::Texts => ("application/json", ArrayBuilder::new().items(text()).build().into()),
            Body::Anything => ("*/*", anything()),
        };
        let required = if required { Required::True } else { Required::False };
        built = built.request_body(Some(
            RequestBodyBuilder::new()
                .required(Some(required))
                .content(kind, Content::new(Some(schema)))
                .build(),
        ));
    }
    let (status, answer) = operation.ok;
    let mut response = ResponseBuilder::new().description("done");
    if let Answer::Of(name) | Answer::OfOrText(name) = answer {
        response = response.content("application/json", Content::new(Some(reference(name))));
    }
    if let Answer::Text | Answer::OfOrText(_) = answer {
        response = response.content("text/plain", Content::new(Some(text())));
    }
    if let Answer::Anything = answer {
        // Any status of the service in the sandbox.
        let any = ResponseBuilder::new()
            .description("as the service in the sandbox has it")
            .content("*/*", Content::new(Some(anything())));
        built = built.response("default", any);
        response = response.content("*/*", Content::new(Some(anything())));
    }
    built = built.response(status.to_string(), response);
    for status in operation.errors {
        let schema = if *status == 422 { "HTTPValidationError" } else { "ErrorResponse" };
        let response = ResponseBuilder::new()
            .description("refused")
            .content("application/json", Content::new(Some(reference(schema))));
        built = built.response(status.to_string(), response);
    }
    PathItem::new(operation.method, built)
}

fn tag(path: &str) -> &'static str {
    let segment = path.split('/').next_back().unwrap_or_default();
    match (path.split('/').nth(1), segment) {
        (_, "networkpolicy") => "Network policy",
        _ if path.contains("/diagnostics/") => "Diagnostics",
        _ if path.contains("/proxy/") => "Proxy",
        (Some("pools"), _) => "Pools",
        (Some("snapshots"), _) | (_, "snapshots") => "Snapshots",
        (Some("templates"), _) => "Templates",
        (Some("sandboxes"), _) => "Sandboxes",
        _ => "Server",
    }
}

fn query_parameter(parameter: Parameter) -> ParameterBuilder {
    let (name, schema): (_, RefOr<Schema>) = match parameter {
        Text(name) => (name, text()),
        Texts(name) => (name, ArrayBuilder::new().items(text()).build().into()),
        Flag(name) => {
            (name, ObjectBuilder::new().schema_type(Type::Boolean).default(Some(false.into())).build().into())
        }
        Int(name, min, max, default) => (name, int(min, max, default)),
    };
    ParameterBuilder::new()
        .name(name)
        .parameter_in(ParameterIn::Query)
        .required(Required::False)
        .schema(Some(schema))
}

fn reference(name: &str) -> RefOr<Schema> {
    Ref::from_schema_name(name).into()
}

fn anything() -> RefOr<Schema> {
    ObjectBuilder::new().schema_type(SchemaType::AnyValue).build().into()
}

fn text() -> RefOr<Schema> {
    ObjectBuilder::new().schema_type(Type::String).build().into()
}

fn int(min: u64, max: u64, default: Option<u64>) -> RefOr<Schema> {
    let mut schema = ObjectBuilder::new().schema_type(Type::Integer).default(default.map(Into::into));
    schema = schema.minimum(usize::try_from(min).ok());
    // No bound to speak of is none in the document.
    if max != u64::MAX {
        schema = schema.maximum(usize::try_from(max).ok());
    }
    schema.build().into()
}

fn validation_error() -> RefOr<Schema> {
    let step = SchemaType::from_iter([Type::String, Type::Integer]);
    ObjectBuilder::new()
        .schema_type(Type::Object)
        .property("loc", ArrayBuilder::new().items(ObjectBuilder::new().schema_type(step)))
        .property("msg", text())
        .property("type", text())
        .required("loc")
        .required("msg")
        .required("type")
        .build()
        .into()
}

fn validation_body() -> RefOr<Schema> {
    ObjectBuilder::new()
        .schema_type(Type::Object)
        .property("detail", ArrayBuilder::new().items(reference("ValidationError")))
        .property("code", text())
        .property("message", text())
        .build()
        .into()
}

fn framework_error() -> RefOr<Schema> {
    ObjectBuilder::new()
        .schema_type(Type::Object)
        .property("detail", text())
        .property("code", text())
        .property("message", text())
        .required("detail")
        .additional_properties(Some(AdditionalProperties::<Schema>::FreeForm(false)))
        .build()
        .into()
}
