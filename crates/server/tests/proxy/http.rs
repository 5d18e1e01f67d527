//! Requests and responses: what arrives, what does not.

use osb_server::proxy::Options;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{Answer, Backend, Server, read_request};

#[tokio::test]
async fn path_and_query_arrive_byte_for_byte() {
    let server = Server::start().await;
    server.reflecting(8000).await;
    for (sent, received) in [
        ("", "/"),
        ("/", "/"),
        ("/?", "/?"),
        ("?x=1", "/?x=1"),
        ("/x?a=1&b=%2F&c=a+b&c=2", "/x?a=1&b=%2F&c=a+b&c=2"),
        ("/a%2Fb//c/./../d?%ff&&=", "/a%2Fb//c/./../d?%ff&&="),
        ("//double", "//double"),
        ("/%00%0d%0a", "/%00%0d%0a"),
    ] {
        let answer = server.get(8000, sent).await;
        assert_eq!(answer.text().lines().next(), Some(format!("GET {received} HTTP/1.1").as_str()), "{sent}");
    }
    // Bare, without `/v1`, and with the doubled slash of clients that do not clean their base address.
    for base in ["/sandboxes", "//v1/sandboxes"] {
        let target = format!("{base}/{}/proxy/8000/p", server.id);
        let answer =
            server.raw(format!("GET {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")).await;
        assert!(answer.text().starts_with("GET /p HTTP/1.1\r\n"), "{base}");
    }
    // Something else is given back.
    let other = "GET /v1/sandboxes HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
    assert_eq!(server.raw(other).await.status, 418);
}

#[tokio::test]
async fn hop_by_hop_headers_and_those_named_by_connection_stay_out() {
    let server = Server::start().await;
    server.reflecting(8000).await;
    let target = server.base(8000);
    let answer = server
        .raw(format!(
            "GET {target}/ HTTP/1.1\r\nHost: h\r\nConnection: close, X-Secret\r\nX-Secret: 1\r\nTrailer: T\r\n\
             TE: trailers\r\nKeep-Alive: timeout=5\r\nProxy-Authorization: x\r\nX-Kept: 1\r\nX-Kept: 2\r\n\r\n"
        ))
        .await;
    let text = answer.text().to_lowercase();
    for name in ["connection", "x-secret", "trailer", "te", "keep-alive", "proxy-authorization"] {
        assert!(!text.contains(&format!("\r\n{name}:")), "{name} in {text}");
    }
    assert!(text.contains("x-kept: 1\r\nx-kept: 2\r\n"), "{text}");
}

#[tokio::test]
async fn credentials_stay_out_and_nothing_is_made_up() {
    let server = Server::start().await;
    server.reflecting(8000).await;
    let headers = "Authorization: Bearer x\r\nCookie: a=b\r\nOPEN-SANDBOX-API-KEY: k\r\n\
                   OpenSandbox-Secure-Access: s\r\nOpenSandbox-Access-Renew: skip\r\nX-EXECD-ACCESS-TOKEN: t\r\n\
                   OPENSANDBOX-EGRESS-AUTH: e\r\n";
    let answer = server.send("GET", 8000, "/", headers, "").await;
    let prefix = server.base(8000);
    assert_eq!(
        answer.text(),
        format!(
            "GET / HTTP/1.1\r\nhost: 127.0.0.1:8000\r\nopensandbox-egress-auth: e\r\nx-execd-access-token: t\r\n\
             x-forwarded-for: 127.0.0.1\r\nx-forwarded-port: 81\r\nx-forwarded-proto: http\r\n\
             x-forwarded-host: front:81\r\nx-forwarded-prefix: {prefix}\r\n\r\n"
        )
    );
}

#[tokio::test]
async fn forged_forwarding_headers_are_replaced() {
    let server = Server::start().await;
    server.reflecting(8000).await;
    let headers = "X-Forwarded-For: 1.2.3.4\r\nX-Forwarded-For: 5.6.7.8\r\nX-Forwarded-Host: evil\r\n\
                   X-Forwarded-Proto: https\r\nX-Forwarded-Prefix: /evil\r\nX-Real-IP: 1.2.3.4\r\n\
                   Forwarded: for=1.2.3.4\r\n";
    let text = server.send("GET", 8000, "/", headers, "").await.text();
    for forged in ["1.2.3.4", "5.6.7.8", "evil", "https"] {
        assert!(!text.contains(forged), "{text}");
    }
    assert!(text.contains("x-forwarded-for: 127.0.0.1\r\n"));

    let trusting = Server::with(Options { trust_local_peers: true, ..Options::default() }).await;
    trusting.reflecting(8000).await;
    let headers = "X-Forwarded-For: 1.2.3.4\r\nX-Forwarded-Proto: https\r\n";
    let text = trusting.send("GET", 8000, "/", headers, "").await.text();
    assert!(text.contains("x-forwarded-for: 1.2.3.4\r\n") && text.contains("x-forwarded-proto: https\r\n"));
}

#[tokio::test]
async fn no_cookie_of_one_answer_is_sent_with_another_request() {
    let server = Server::start().await;
    server.scripted(8000, "HTTP/1.1 200 OK\r\nSet-Cookie: sid=1; Path=/\r\nContent-Length: 0\r\n\r\n").await;
    assert_eq!(server.get(8000, "/").await.header("set-cookie"), Some("sid=1; Path=/"));
    server.reflecting(8000).await;
    assert!(!server.get(8000, "/").await.text().contains("sid"));
}

#[tokio::test]
async fn bodies_of_every_method_keep_their_framing() {
    let server = Server::start().await;
    server.reflecting(8000).await;
    for method in ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"] {
        let body = r#"["/tmp/a","/tmp/b"]"#;
        let length = format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
        let text = server.send(method, 8000, "/", &length, body).await.text();
        assert!(text.starts_with(&format!("{method} / HTTP/1.1\r\n")), "{text}");
        assert!(text.contains(&format!("content-length: {}\r\n", body.len())), "{method}: {text}");
        assert!(text.ends_with(body) && !text.contains("transfer-encoding"), "{method}: {text}");

        let chunks = "3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n";
        let text = server.send(method, 8000, "/", "Transfer-Encoding: chunked\r\n", chunks).await.text();
        assert!(text.contains("transfer-encoding: chunked\r\n"), "{method}: {text}");
        assert!(
            text.contains("abc") && text.contains("de\r\n") && !text.contains("content-length"),
            "{text}"
        );

        let text = server.send(method, 8000, "/", "", "").await.text();
        assert!(text.ends_with("\r\n\r\n") && !text.contains("transfer-encoding"), "{method}: {text}");
    }
    let text = server.send("POST", 8000, "/", "Content-Length: 0\r\n", "").await.text();
    assert!(text.contains("content-length: 0\r\n"), "{text}");
}

#[tokio::test]
async fn head_passes_with_its_length_and_other_methods_are_refused() {
    let server = Server::start().await;
    server.scripted(8000, "HTTP/1.1 200 OK\r\nContent-Length: 1234\r\nETag: \"x\"\r\n\r\n").await;
    let answer = server.send("HEAD", 8000, "/", "", "").await;
    assert_eq!((answer.status, answer.header("content-length")), (200, Some("1234")));
    assert!(answer.raw_body.is_empty());
    for method in ["TRACE", "PROPFIND"] {
        let answer = server.send(method, 8000, "/", "", "").await;
        assert_eq!(answer.status, 405);
        assert_eq!(answer.header("allow"), Some("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"));
        assert_eq!(answer.code(), "GENERAL::UNKNOWN_ERROR");
    }
}

#[tokio::test]
async fn answers_without_a_body_get_no_length_made_up() {
    let server = Server::start().await;
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    for (port, method, answer) in [
        (1, "HEAD", chunked),
        (2, "GET", "HTTP/1.1 304 Not Modified\r\n\r\n"),
        (3, "GET", "HTTP/1.1 204 X\r\n\r\n"),
    ] {
        server.scripted(port, answer).await;
        let answer = server.send(method, port, "/", "", "").await;
        assert_eq!((answer.header("content-length"), answer.raw_body.len()), (None, 0), "{method} {port}");
    }
}

#[tokio::test]
async fn expect_continue_is_answered_once_the_backend_is_there() {
    let server = Server::start().await;
    server.reflecting(8000).await;
    let target = server.base(8000);
    let mut client = server.connect().await;
    let head = format!(
        "POST {target}/ HTTP/1.1\r\nHost: h\r\nConnection: close\r\nExpect: 100-Continue\r\nContent-Length: 2\r\n\r\n"
    );
    client.write_all(head.as_bytes()).await.unwrap();
    let mut interim = [0; 25];
    client.read_exact(&mut interim).await.unwrap();
    assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    client.write_all(b"ok").await.unwrap();
    let answer = Answer::read(&mut client).await;
    assert!(answer.text().ends_with("\r\n\r\nok") && !answer.text().contains("expect"));

    // With nobody there, no body is asked for.
    let target = server.base(9);
    let head = format!(
        "POST {target}/ HTTP/1.1\r\nHost: h\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    );
    assert_eq!(server.raw(head).await.status, 502);
}

#[tokio::test]
async fn interim_answers_of_the_backend_do_not_disturb() {
    let server = Server::start().await;
    let answer = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n\
                  HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi";
    server.scripted(8000, answer).await;
    let answer = server.get(8000, "/").await;
    assert_eq!((answer.status, answer.text().as_str(), answer.header("link")), (200, "hi", None));
}

#[tokio::test]
async fn statuses_and_bodies_of_the_backend_pass_unchanged() {
    let server = Server::start().await;
    for (line, status) in
        [("404 Not Found", 404), ("418 I'm a teapot", 418), ("500 Oops", 500), ("503 X", 503)]
    {
        let body = format!("<html>{status}</html>");
        let head = format!("HTTP/1.1 {line}\r\nContent-Type: text/html\r\nRetry-After: 7\r\n");
        server.scripted(8000, format!("{head}Content-Length: {}\r\n\r\n{body}", body.len())).await;
        let answer = server.get(8000, "/").await;
        assert_eq!((answer.status, answer.text()), (status, body));
        assert_eq!(answer.all("retry-after"), ["7"]);
    }
}

#[tokio::test]
async fn response_headers_follow_the_rules() {
    let server = Server::start().await;
    let answer = "HTTP/1.1 302 Found\r\nServer: nginx\r\nConnection: X-Hop, close\r\nX-Hop: 1\r\nKeep-Alive: x\r\n\
                  Set-Cookie: a=1, x\r\nSet-Cookie: b=2\r\nLocation: /login?next=%2F\r\nDate: yesterday\r\n\
                  Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nzip";
    server.scripted(8000, answer).await;
    let answer = server.get(8000, "/").await;
    assert_eq!(answer.all("set-cookie"), ["a=1, x", "b=2"]);
    assert_eq!(answer.header("location"), Some(format!("{}/login?next=%2F", server.base(8000)).as_str()));
    assert_eq!(answer.all("date"), ["yesterday"]);
    assert_eq!((answer.header("content-encoding"), answer.text().as_str()), (Some("gzip"), "zip"));
    for name in ["server", "x-hop", "keep-alive"] {
        assert_eq!(answer.header(name), None);
    }
}

#[tokio::test]
async fn redirects_follow_the_public_address() {
    let address = Some("https://sandbox.example.org:8443/team/".to_owned());
    let server = Server::with(Options { public_address: address, ..Options::default() }).await;
    server.scripted(80, "HTTP/1.1 301 M\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n").await;
    let expected = format!("/team/sandboxes/{}/proxy/80/x", server.id);
    assert_eq!(server.get(80, "/").await.header("location"), Some(expected.as_str()));
}

#[tokio::test]
async fn names_below_the_suffix_lead_to_sandboxes() {
    let suffix = Some("localhost".to_owned());
    let server = Server::with(Options { endpoint_suffix: suffix, ..Options::default() }).await;
    server.reflecting(8000).await;
    let host = format!("8000-{}.localhost:8080", server.id);
    let answer = server
        .raw(format!("GET /v1/sandboxes?x HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"))
        .await;
    assert!(answer.text().starts_with("GET /v1/sandboxes?x HTTP/1.1\r\nhost: 127.0.0.1:8000\r\n"));
    assert!(answer.text().contains("x-forwarded-prefix: /\r\n"));
    assert!(answer.text().contains(&format!("x-forwarded-host: {host}\r\n")));
    server.scripted(8001, "HTTP/1.1 301 M\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n").await;
    let host = format!("8001-{}.localhost", server.id);
    let answer = server.raw(format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")).await;
    assert_eq!(answer.header("location"), Some("/x"));
}

#[tokio::test]
async fn old_clients_and_old_backends() {
    let server = Server::start().await;
    // HTTP/1.0 in front of chunks: the body ends with the connection.
    server
        .scripted(1, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")
        .await;
    let answer = server.raw(format!("GET {} HTTP/1.0\r\n\r\n", server.base(1))).await;
    assert_eq!((answer.status, answer.text().as_str()), (200, "abc"));
    assert_eq!(answer.header("transfer-encoding"), None);
    // HTTP/1.0 behind: no length, ended by closing; the client gets chunks.
    server.scripted(2, "HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nold").await;
    let answer = server.get(2, "/").await;
    assert_eq!(answer.header("transfer-encoding"), Some("chunked"));
    assert_eq!(answer.text(), "3\r\nold\r\n0\r\n\r\n");
}

#[tokio::test]
async fn trailers_reach_a_client_that_asks_for_them() {
    let server = Server::start().await;
    let answer = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n\
                  2\r\nab\r\n0\r\nX-Sum: 7\r\n\r\n";
    server.scripted(8000, answer).await;
    let target = server.base(8000);
    let request =
        |headers: &str| format!("GET {target} HTTP/1.1\r\nHost: h\r\nConnection: close{headers}\r\n\r\n");
    let asking = server.raw(request(", TE\r\nTE: trailers")).await;
    assert_eq!(asking.text(), "2\r\nab\r\n0\r\nx-sum: 7\r\n\r\n");
    let plain = server.raw(request("")).await;
    assert_eq!((plain.text().as_str(), plain.header("trailer")), ("2\r\nab\r\n0\r\n\r\n", None));
    // Those of a request end here, and the request is whole without them.
    server.reflecting(8001).await;
    let headers = "Transfer-Encoding: chunked\r\nTrailer: X-Sum\r\n";
    let text = server.send("POST", 8001, "/", headers, "2\r\nab\r\n0\r\nX-Sum: 7\r\n\r\n").await.text();
    assert!(text.ends_with("2\r\nab\r\n0\r\n\r\n") && !text.contains("x-sum"), "{text}");
}

#[tokio::test]
async fn the_daemon_is_reached_by_its_own_socket() {
    let server = Server::start().await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("execd.sock");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    server.place(44772, Backend::Unix(path));
    // Nobody accepts yet: the request waits in the socket's queue and does not fail.
    let waiting = server.get(44772, "/ping");
    let accepting = async {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        let (mut stream, _) = listener.accept().await.unwrap();
        let request = read_request(&mut stream, &mut Vec::new()).await.unwrap();
        assert!(request.starts_with(b"GET /ping HTTP/1.1\r\nhost: 127.0.0.1:44772\r\n"));
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await.unwrap();
        stream
    };
    let (answer, _stream) = tokio::join!(waiting, accepting);
    assert_eq!(answer.status, 200);
}
