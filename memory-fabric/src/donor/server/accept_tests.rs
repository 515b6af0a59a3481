use super::*;
use crate::donor::server::{Donor, DonorConfig};
use fabric_identity::{ExpectedNode, Role};
use fabric_pki::{Authority, Validity};
use fabric_transport::rdma::DeviceChoice;

const MONTH: Validity = Validity { days: 30 };

/// A donor, and the connection of a VM whose handshake is over, and which has a place.
struct Accepted {
    files: tempfile::TempDir,
    authority: Authority,
    donor: Donor,
    place: TakenPlace,
    stream: Stream,
    _client: TlsStream,
}

fn accepted() -> Accepted {
    let files = tempfile::tempdir().expect("a directory");
    let path = |name: &str| files.path().join(name);
    let cluster = "prod".parse().expect("a name");
    let authority = Authority::create(&path("authority"), cluster, MONTH);
    let mut authority = authority.expect("an authority");
    let mut member = |holder: &str, role| {
        let (directory, name) = (path(holder), holder.parse().expect("a holder"));
        let issued = authority.issue(&name, MONTH, &directory);
        issued.expect("a certificate");
        SharedCredentials::load(&directory, role).expect("credentials")
    };
    let node = member("node/alpha", Role::Node);
    let vm = ExpectedNode {
        credentials: member("vm/web", Role::Vm),
        name: "alpha".parse().expect("a name"),
    };
    let donor = Donor::start(&DonorConfig {
        listen: ([127, 0, 0, 1], 0).into(),
        memory_bytes: 1 << 21,
        lease_duration_max: Duration::from_secs(60),
        spin: Duration::ZERO,
        rdma: DeviceChoice::None,
        credentials: Some(Arc::clone(&node)),
        allow: None,
    })
    .expect("a donor");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let socket = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
    let (accepted, peer) = listener.accept().expect("a client");
    let accepted = Arc::new(accepted);
    let number = donor
        .shared
        .admit(peer, Closer::Tcp(Arc::clone(&accepted)))
        .expect("a place");
    let place = donor.shared.begin(number, peer, Made::Tls);
    let place = place.expect("a thread");
    let (stream, client) = std::thread::scope(|scope| {
        let client = scope.spawn(|| TlsStream::connect(socket, &vm));
        let stream = open(accepted, Some(&node)).expect("a member");
        (stream, client.join().expect("no panic").expect("a node"))
    });
    Accepted {
        files,
        authority,
        donor,
        place,
        stream,
        _client: client,
    }
}

#[test]
fn a_peer_that_is_revoked_while_it_connects_is_not_served() {
    let Accepted {
        files,
        mut authority,
        donor,
        place,
        stream,
        _client,
    } = accepted();
    let path = |name: &str| files.path().join(name);
    let revoked = authority.revoke_holder(&"vm/web".parse().expect("a holder"));
    revoked.expect("revoked");
    std::fs::copy(
        path("authority").join("crl.pem"),
        path("node/alpha").join("crl.pem"),
    )
    .expect("copied");
    let reloaded = donor.reload(None).expect("read again");
    assert_eq!(reloaded.expect("under TLS").connections, 0, "not known yet");
    let error = known(&donor.shared, &place, stream).expect_err("it was revoked");
    assert!(error.to_string().contains("not accepted"), "{error}");
}

#[test]
fn connections_are_opened_while_the_certificates_of_others_are_verified() {
    let Accepted {
        donor,
        place,
        stream,
        ..
    } = &accepted();
    place.note_peer(stream, false).expect("a member");
    let ended = donor.shared.end(|_| {
        let (counted, count) = std::sync::mpsc::channel();
        let shared = Arc::clone(&donor.shared);
        std::thread::spawn(move || counted.send(shared.members()));
        let count = count.recv_timeout(Duration::from_secs(10));
        (count == Ok(1)).then(|| "its certificate".to_owned())
    });
    assert_eq!(ended, 1);
}
