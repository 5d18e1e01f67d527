//! Settings.

/// All settings, resolved.
#[derive(Debug, Clone, Default)]
pub struct Config {
    /// `[server]`.
    pub server: Server,
    /// `[embedded]`.
    pub embedded: Embedded,
}

/// `[server]`.
#[derive(Debug, Clone, Default)]
pub struct Server {
    /// Public host put into endpoints as it is; may hold a port and a path.
    pub eip: Option<String>,
    /// Whether every sandbox's endpoints demand a token of their own.
    pub require_endpoint_token: bool,
}

/// `[embedded]`.
#[derive(Debug, Clone, Default)]
pub struct Embedded {
    /// Domain below which `PORT-ID` names route to sandboxes.
    pub endpoint_suffix: Option<String>,
}
