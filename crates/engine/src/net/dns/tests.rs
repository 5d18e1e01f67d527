//! The forwarder against servers on loopback.

use std::time::Instant;

use tokio::io::AsyncReadExt;

use super::*;

fn query(id: u16, name: &str) -> Vec<u8> {
    let mut bytes = id.to_be_bytes().to_vec();
    bytes.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    for label in name.split('.') {
        bytes.push(u8::try_from(label.len()).unwrap());
        bytes.extend(label.bytes());
    }
    bytes.extend([0, 0, 1, 0, 1]);
    bytes
}

/// The query as a response with 192.0.2.7 in it.
fn answer(query: &[u8]) -> Vec<u8> {
    let mut bytes = query.to_vec();
    bytes[2] |= 0x80;
    bytes[7] = 1;
    bytes.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 7]);
    bytes
}

/// A server that replies to each query with the datagrams `reply` makes of it.
async fn server(reply: impl Fn(&[u8]) -> Vec<Vec<u8>> + Send + 'static) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(async move {
        let mut buffer = [0; 2048];
        while let Ok((length, client)) = socket.recv_from(&mut buffer).await {
            for datagram in reply(&buffer[..length]) {
                socket.send_to(&datagram, client).await.unwrap();
            }
        }
    });
    address
}

/// A forwarder on an address of loopback that tests share with nothing.
fn forwarder(last: u8, servers: &[SocketAddr]) -> (DnsForwarder, SocketAddr) {
    let gateway = Ipv4Addr::new(127, 231, 53, last);
    let forwarder = DnsForwarder::start(gateway, Some(servers.to_vec())).unwrap();
    let address = SocketAddr::new(gateway.into(), forwarder.port());
    (forwarder, address)
}

async fn ask(forwarder: SocketAddr, message: &[u8]) -> Option<Vec<u8>> {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.send_to(message, forwarder).await.unwrap();
    let mut buffer = [0; 2048];
    let received = tokio::time::timeout(Duration::from_secs(6), socket.recv(&mut buffer)).await.ok()?;
    Some(buffer[..received.unwrap()].to_vec())
}

#[tokio::test]
async fn answers_come_back_unchanged_under_the_clients_id() {
    let upstream = server(|query| vec![answer(query)]).await;
    let (_forwarder, address) = forwarder(1, &[upstream]);
    for id in [7, 0xffff] {
        let question = query(id, "example.org");
        assert_eq!(ask(address, &question).await.unwrap(), answer(&question));
    }
}

#[tokio::test]
async fn ids_and_ports_differ_from_question_to_question() {
    let (seen, mut seeing) = tokio::sync::mpsc::unbounded_channel();
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let upstream = socket.local_addr().unwrap();
    tokio::spawn(async move {
        let mut buffer = [0; 2048];
        while let Ok((length, client)) = socket.recv_from(&mut buffer).await {
            seen.send((buffer[0], buffer[1], client.port())).unwrap();
            socket.send_to(&answer(&buffer[..length]), client).await.unwrap();
        }
    });
    let (_forwarder, address) = forwarder(2, &[upstream]);
    let mut all = std::collections::HashSet::new();
    for _ in 0..16 {
        ask(address, &query(1, "example.org")).await.unwrap();
        all.insert(seeing.recv().await.unwrap());
    }
    assert!(all.len() > 14, "{all:?}");
}

#[tokio::test]
async fn forged_answers_are_passed_over() {
    let upstream = server(|query| {
        let mut wrong_id = answer(query);
        wrong_id[0] ^= 1;
        let mut wrong_name = answer(query);
        wrong_name[13] = b'x';
        vec![vec![], vec![0; 3], query.to_vec(), wrong_id, wrong_name, answer(query)]
    })
    .await;
    let (_forwarder, address) = forwarder(3, &[upstream]);
    let question = query(7, "example.org");
    assert_eq!(ask(address, &question).await.unwrap(), answer(&question));
}

#[tokio::test]
async fn the_next_server_is_asked_when_one_refuses_or_is_not_there() {
    let gone = UdpSocket::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let refusing = server(|query| {
        let mut bytes = query.to_vec();
        bytes[2] |= 0x80;
        bytes[3] = 5;
        vec![bytes]
    })
    .await;
    let good = server(|query| vec![answer(query)]).await;
    let (_forwarder, address) = forwarder(4, &[gone, refusing, good]);
    let question = query(7, "example.org");
    assert_eq!(ask(address, &question).await.unwrap(), answer(&question));

    let (_forwarder, address) = forwarder(5, &[gone, refusing]);
    assert_eq!(ask(address, &question).await.unwrap()[3] & 15, 5, "better a refusal than nothing");
    let (_forwarder, address) = forwarder(6, &[gone]);
    let began = Instant::now();
    assert_eq!(ask(address, &question).await.unwrap()[3] & 15, 2);
    assert!(began.elapsed() < Duration::from_secs(1), "a closed port is known at once");
}

#[tokio::test]
async fn a_silent_server_ends_in_a_failure_before_the_client_gives_up() {
    let silent = server(|_| vec![]).await;
    let (_forwarder, address) = forwarder(7, &[silent]);
    let reply = ask(address, &query(7, "example.org")).await.unwrap();
    assert_eq!((reply[0], reply[1], reply[3] & 15), (0, 7, 2));
}

#[tokio::test]
async fn hostile_datagrams_and_streams_do_not_stop_it() {
    let upstream = server(|query| vec![answer(query)]).await;
    let (_forwarder, address) = forwarder(8, &[upstream]);
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let mut compressed = query(1, "example.org");
    compressed[12] = 0xc0;
    for bad in [&[][..], &[0; 12], &[0xff; 4000], &[0; 9000], &compressed, &answer(&query(1, "a.b"))] {
        socket.send_to(bad, address).await.unwrap();
    }
    for bad in [&[0xff, 0xff, 1, 2][..], &[0, 0], &[0, 3, 1, 2, 3], &[1]] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(bad).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut rest = Vec::new();
        // Closed or reset, but in no case answered.
        let _ = stream.read_to_end(&mut rest).await;
        assert!(rest.is_empty());
    }
    let question = query(7, "example.org");
    assert_eq!(ask(address, &question).await.unwrap(), answer(&question));
}

#[tokio::test]
async fn a_client_has_a_bounded_number_of_questions_and_connections() {
    let silent = server(|_| vec![]).await;
    let (_forwarder, address) = forwarder(9, &[silent]);
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    for id in 0..300 {
        socket.send_to(&query(id, "example.org"), address).await.unwrap();
    }
    let mut buffer = [0; 512];
    let mut answers = 0;
    let patience = Duration::from_secs(7);
    while tokio::time::timeout(patience, socket.recv(&mut buffer)).await.is_ok() {
        answers += 1;
        if answers == QUESTIONS.each {
            break;
        }
    }
    assert_eq!(answers, QUESTIONS.each);
    let more = tokio::time::timeout(Duration::from_millis(300), socket.recv(&mut buffer)).await;
    assert!(more.is_err(), "what was too much got no answer");

    let mut open = Vec::new();
    for _ in 0..CONNECTIONS.each + 1 {
        open.push(TcpStream::connect(address).await.unwrap());
    }
    let last = open.last_mut().unwrap();
    let read = tokio::time::timeout(Duration::from_secs(2), last.read(&mut buffer)).await.unwrap();
    assert!(matches!(read, Ok(0) | Err(_)), "one too many is closed");
}

#[tokio::test]
async fn tcp_goes_over_tcp_with_several_questions_on_a_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let message = read_message(&mut stream, 4096).await.unwrap();
            stream.write_all(&framed(&answer(&message))).await.unwrap();
        }
    });
    let (_forwarder, address) = forwarder(10, &[upstream]);
    let mut stream = TcpStream::connect(address).await.unwrap();
    for id in [1, 2, 3] {
        let question = query(id, "example.org");
        stream.write_all(&framed(&question)).await.unwrap();
        assert_eq!(read_message(&mut stream, 4096).await.unwrap(), answer(&question));
    }
    let mut transfer = query(4, "example.org");
    let place = transfer.len() - 3;
    transfer[place] = 252;
    stream.write_all(&framed(&transfer)).await.unwrap();
    assert_eq!(read_message(&mut stream, 4096).await.unwrap()[3] & 15, 5, "no zone transfers");
}

#[tokio::test]
async fn a_taken_port_is_evaded() {
    let taken = std::net::UdpSocket::bind("127.231.53.11:53").unwrap();
    let upstream = server(|query| vec![answer(query)]).await;
    let (forwarder, address) = forwarder(11, &[upstream]);
    assert_ne!(forwarder.port(), DNS);
    let question = query(7, "example.org");
    assert_eq!(ask(address, &question).await.unwrap(), answer(&question));
    drop(taken);
}
