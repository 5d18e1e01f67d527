//! Isolated sessions: trees of their own beside the sandbox's.

use opensandbox::{IsolatedSessionSpec, IsolatedWorkspace};

use crate::need;
use crate::server::Guarded;

#[tokio::test]
async fn a_session_works_on_a_copy_that_goes_with_it() {
    let sandbox = need!(Guarded::start().await);
    let isolation = sandbox.isolation();
    let can = isolation.capabilities().await.unwrap();
    assert!(can.available, "{can:?}");
    sandbox.files().write("/workspace/a", "of the sandbox").await.unwrap();

    let workspace = IsolatedWorkspace { path: "/workspace".to_owned(), mode: None };
    let spec = IsolatedSessionSpec { workspace: Some(workspace), ..Default::default() };
    let session = isolation.create(&spec).await.unwrap();
    let changed = session.shell("cd /workspace; printf mine > a; name=kept; cat a").output().await;
    assert_eq!(changed.unwrap().stdout.trim_end(), "mine");
    assert_eq!(session.shell("echo $name").output().await.unwrap().stdout.trim_end(), "kept");
    assert!(!session.shell("false").output().await.unwrap().success());
    assert_eq!(session.files().read("/workspace/a").await.unwrap(), "mine");
    assert_eq!(sandbox.files().read("/workspace/a").await.unwrap(), "of the sandbox");

    assert!(isolation.list().await.unwrap().iter().any(|one| one.session_id == session.id()));
    let attached = isolation.attach(session.id());
    attached.delete().await.unwrap();
    assert!(session.shell("true").output().await.unwrap_err().is_not_found());
    let missing = isolation.attach("none").files().read("/workspace/a").await;
    assert!(missing.unwrap_err().is_not_found());
}
