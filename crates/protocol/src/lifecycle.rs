//! Wire types of the lifecycle API.
//!
//! Requests are read leniently: a `null` stands for an absent optional member, members may be spelled in
//! snake_case, whole numbers may come as `100`, `100.0` or `"100"`. Answers never carry a `null`: the official
//! Python client fails on one.

mod create;
mod diagnostics;
mod lenient;
mod network;
mod pool;
mod sandbox;
#[cfg(feature = "openapi")]
mod schemas;
mod snapshot;
mod template;
mod volume;

pub use create::{
    CreateSandboxRequest, CreateSandboxResponse, CredentialProxyConfig, ImageAuth, ImageSpec, LifecycleHook,
    PeriodicLifecycleHook, PlatformSpec, SandboxLifecycle,
};
pub use diagnostics::{
    DiagnosticContentResponse, DiagnosticDelivery, DiagnosticKind, HealthResponse, MetricsEvent,
    VersionResponse,
};
pub use network::{NetworkPolicy, NetworkRule, PolicyAction, PolicyStatusResponse};
pub use pool::{
    CreatePoolRequest, ListPoolsResponse, PoolCapacitySpec, PoolResponse, PoolStatus, UpdatePoolRequest,
};
pub use sandbox::{
    AllocationSummary, Endpoint, ListSandboxesResponse, PaginationInfo, PatchSandboxMetadataRequest,
    RenewSandboxExpirationRequest, RenewSandboxExpirationResponse, Sandbox, SandboxState, SandboxStatus,
};
pub use snapshot::{CreateSnapshotRequest, ListSnapshotsResponse, Snapshot, SnapshotStatus};
pub use template::{
    CreateFsbTemplateRequest, FsbTemplate, FsbTemplateReadiness, FsbTemplateStatus, ListFsbTemplatesResponse,
    TemplateFormat, TemplatePhase,
};
pub use volume::{HostVolume, OssfsVersion, OssfsVolume, PvcVolume, Volume};

/// Request header with the server's key.
pub const API_KEY_HEADER: &str = "open-sandbox-api-key";
/// Header that names a request in logs; echoed on every answer.
pub const REQUEST_ID_HEADER: &str = "x-request-id";
/// Header of endpoint answers that tells template sandboxes apart.
pub const ORIGIN_HEADER: &str = "open-sandbox-origin";
/// Header with the token of a sandbox's egress API.
pub const EGRESS_AUTH_HEADER: &str = "opensandbox-egress-auth";
/// Header with the token of a secured sandbox.
pub const SECURE_ACCESS_HEADER: &str = "opensandbox-secure-access";
/// Port of the egress API of every sandbox that has one.
pub const EGRESS_PORT: u16 = 18080;
/// Shortest lifetime that a create may ask for, in seconds.
pub const MIN_TIMEOUT_SECONDS: i64 = 60;
/// Largest page of a list.
pub const MAX_PAGE_SIZE: u32 = 200;
/// Page size when a list request names none.
pub const DEFAULT_PAGE_SIZE: u32 = 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn read<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, String> {
        serde_json::from_str(text).map_err(|e| e.to_string())
    }

    #[test]
    fn create_request_is_read_leniently() {
        let request: CreateSandboxRequest = read(
            r#"{"image":{"uri":"python:3.12","auth":null},"timeout":"600","resource_limits":{"cpu":"1"},
                "env":{"A":"b","N":null},"secureAccess":null,"metadata":null,"volumes":null,"entrypoint":["sh"],
                "network_policy":{"defaultAction":"Deny","egress":[{"action":"ALLOW","target":"a.b"}]},
                "surprise":1}"#,
        )
        .unwrap();
        assert_eq!(request.timeout, Some(600));
        assert_eq!(request.env.unwrap()["N"], None);
        assert!(!request.secure_access && request.metadata.is_none());
        let policy = request.network_policy.unwrap();
        assert_eq!(policy.default_action, Some(PolicyAction::Deny));
        assert_eq!(policy.egress[0].action, PolicyAction::Allow);
        for (timeout, read_as) in [("100", 100), ("100.0", 100), ("\"100.0\"", 100)] {
            let request: CreateSandboxRequest = read(&format!(r#"{{"timeout":{timeout}}}"#)).unwrap();
            assert_eq!(request.timeout, Some(read_as));
        }
        for bad in [
            "{\"timeout\":100.5}",
            "{\"timeout\":true}",
            "{\"metadata\":{\"a\":1}}",
            "{\"entrypoint\":\"a\"}",
        ] {
            assert!(read::<CreateSandboxRequest>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn answers_have_no_nulls_and_keep_unknown_states() {
        let text =
            r#"{"id":"x","status":{"state":"Dreaming"},"entrypoint":[],"createdAt":"2026-11-30T00:00:00Z"}"#;
        let sandbox: Sandbox = read(text).unwrap();
        assert_eq!(sandbox.status.state, SandboxState::Other("Dreaming".into()));
        assert_eq!(serde_json::to_string(&sandbox).unwrap(), text);
    }

    #[test]
    fn secrets_stay_out_of_debug_output() {
        let spec: ImageSpec =
            read(r#"{"uri":"r.example/x","auth":{"username":"u","password":"hunter2"}}"#).unwrap();
        assert!(!format!("{spec:?}").contains("hunter2"));
    }

    #[test]
    fn pages_are_counted() {
        let at = |page, size, total| PaginationInfo::new(page, size, total);
        assert_eq!((at(1, 20, 0).total_pages, at(1, 20, 0).has_next_page), (0, false));
        assert_eq!((at(1, 20, 21).total_pages, at(1, 20, 21).has_next_page), (2, true));
        assert!(!at(2, 20, 21).has_next_page && !at(9, 20, 21).has_next_page);
    }
}
