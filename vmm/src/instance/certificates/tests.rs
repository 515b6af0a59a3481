//! The watch of certificates beside donors that do not answer.

use std::io::copy;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use fabric_identity::pinned::PinnedIdentity;
use fabric_identity::{ExpectedNode, Role};
use fabric_pki::{Authority, Validity};
use memory_fabric::NodeId;
use memory_fabric::donor::server::{Donor, DonorConfig};
use memory_fabric::link::{Leased, LinkConfig};
use memory_fabric::rdma::DeviceChoice;
use tempfile::TempDir;

use super::*;

/// Timeout of each step, far longer than on the most loaded host.
const LIMIT: Duration = Duration::from_secs(60);

const LEASE_BYTES: u64 = 2 << 20;

/// What a way to the donor does with connections.
#[derive(Debug, Default)]
struct Way {
    /// Closed at once, all others are passed on or held.
    is_cut: AtomicBool,
    is_silent: AtomicBool,
    count: AtomicUsize,
}

impl Way {
    fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }
}

/// Starts a way to `donor`, which ends with the test's process. Each connection is announced.
fn way(donor: SocketAddr, connected: Sender<()>) -> (SocketAddr, Arc<Way>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let address = listener.local_addr().expect("bound");
    let way = Arc::<Way>::default();
    let of_thread = Arc::clone(&way);
    thread::spawn(move || {
        let mut held = Vec::new();
        for client in listener.incoming().flatten() {
            of_thread.count.fetch_add(1, Ordering::SeqCst);
            // Nobody waits for it at the end of a test.
            let _ = connected.send(());
            if of_thread.is_cut.load(Ordering::SeqCst) {
                continue;
            }
            if of_thread.is_silent.load(Ordering::SeqCst) {
                held.push(client);
                continue;
            }
            let donor = TcpStream::connect(donor).expect("a donor");
            let ends = [&client, &donor].map(|end| end.try_clone().expect("a descriptor"));
            let [mut client_too, mut donor_too] = ends;
            let (mut client, mut donor) = (client, donor);
            thread::spawn(move || copy(&mut client, &mut donor_too));
            thread::spawn(move || copy(&mut donor, &mut client_too));
        }
    });
    (address, way)
}

/// A VM with leases at a donor, each of which is delegated and has a way of its own.
struct Vm {
    at: TempDir,
    credentials: Arc<SharedCredentials>,
    donor: Donor,
    ways: Vec<Arc<Way>>,
    connected: Receiver<()>,
    _leases: Vec<Leased>,
    delegations: VecDeque<Delegation>,
}

impl Vm {
    fn new(leases: usize) -> Self {
        let at = tempfile::tempdir().expect("a directory");
        let cluster = "prod".parse().expect("a name");
        let path = at.path().join("authority");
        let mut authority =
            Authority::create(&path, cluster, Validity { days: 365 }).expect("an authority");
        for holder in ["node/alpha", "vm/web"] {
            issue(&mut authority, holder, at.path().join(holder));
        }
        drop(authority);
        let load = |holder, role| {
            let credentials = SharedCredentials::load(&at.path().join(holder), role);
            credentials.expect("credentials")
        };
        let donor = Donor::start(&DonorConfig {
            listen: ([127, 0, 0, 1], 0).into(),
            memory_bytes: leases as u64 * LEASE_BYTES,
            lease_duration_max: LIMIT,
            spin: Duration::ZERO,
            rdma: DeviceChoice::None,
            credentials: Some(load("node/alpha", Role::Node)),
            allow: None,
        });
        let donor = donor.expect("a donor");
        let credentials = load("vm/web", Role::Vm);
        let mut vm = Self {
            at,
            credentials,
            donor,
            ways: Vec::new(),
            connected: unbounded().1,
            _leases: Vec::new(),
            delegations: VecDeque::new(),
        };
        let subject = "spiffe://vm-0011/ssi-hv/node/1".parse();
        let process = PinnedIdentity::generate(&subject.expect("an identity")).expect("a key");
        let (connects, connected) = unbounded();
        for _ in 0..leases {
            let (address, way) = way(vm.donor.address(), connects.clone());
            let leased = Leased::obtain(LinkConfig {
                local: NodeId(0).into(),
                node: NodeId(1),
                address,
                carrier: vm.carrier(),
                vm: "web".to_owned(),
                bytes: LEASE_BYTES,
                or_less: false,
                grace: LIMIT,
            });
            let leased = leased.expect("a lease");
            let mut delegation = leased.delegation(process.fingerprint());
            assert_eq!(delegation.refresh().expect("done"), Delegated::Again);
            way.count.store(0, Ordering::SeqCst);
            vm.ways.push(way);
            vm._leases.push(leased);
            vm.delegations.push_back(delegation);
        }
        vm.connected = connected;
        while vm.connected.try_recv().is_ok() {}
        vm
    }

    fn carrier(&self) -> Carrier {
        Carrier::Tls(ExpectedNode {
            credentials: Arc::clone(&self.credentials),
            name: "alpha".parse().expect("a name"),
        })
    }

    fn authority(&self) -> Authority {
        Authority::open(&self.at.path().join("authority")).expect("an authority")
    }

    /// Gives the VM another certificate, which it has not read yet.
    fn renew(&self) {
        let new = self.at.path().join("new");
        issue(&mut self.authority(), "vm/web", new.clone());
        for file in ["key.pem", "cert.pem"] {
            let to = self.at.path().join("vm/web").join(file);
            std::fs::copy(new.join(file), to).expect("copied");
        }
    }

    fn counts(&self) -> Vec<usize> {
        self.ways.iter().map(|way| way.count()).collect()
    }

    fn cut(&self, cut: [bool; 3]) {
        for (way, cut) in self.ways.iter().zip(cut) {
            way.is_cut.store(cut, Ordering::SeqCst);
        }
    }

    fn silence(&self) {
        for way in &self.ways {
            way.is_silent.store(true, Ordering::SeqCst);
        }
    }
}

fn issue(authority: &mut Authority, holder: &str, output: PathBuf) {
    let holder = holder.parse().expect("a holder");
    let issued = authority.issue(&holder, Validity { days: 60 }, &output);
    issued.expect("a certificate");
}

#[test]
fn a_delegation_that_fails_ends_the_pass_and_is_the_last_one_of_the_next() {
    let mut vm = Vm::new(3);
    let mut delegations = std::mem::take(&mut vm.delegations);
    let mut warned = false;
    let mut pass = |vm: &Vm| {
        delegate(&mut delegations, &mut warned);
        assert_eq!(delegations.len(), 3, "none has ended");
        (vm.counts(), warned)
    };
    assert_eq!(pass(&vm), (vec![0, 0, 0], false), "nothing is new");
    vm.renew();
    vm.credentials.refresh();
    vm.cut([true; 3]);
    assert_eq!(pass(&vm), (vec![1, 0, 0], true));
    assert_eq!(pass(&vm), (vec![1, 1, 0], true));
    assert_eq!(pass(&vm), (vec![1, 1, 1], true));
    // The first one does not answer yet, and the others are not kept from their donor by it.
    vm.cut([true, false, false]);
    assert_eq!(pass(&vm), (vec![2, 1, 1], true));
    assert_eq!(pass(&vm), (vec![3, 2, 2], true));
    vm.cut([false; 3]);
    assert_eq!(pass(&vm), (vec![4, 2, 2], false));
    assert_eq!(pass(&vm), (vec![4, 2, 2], false), "all are done");
}

#[test]
fn a_node_without_a_valid_certificate_is_lost_before_a_silent_donor_is_asked() {
    let mut vm = Vm::new(1);
    let path = vm.at.path().join("node/alpha/cert.pem");
    let node = ShownBy {
        place: 1,
        address: vm.donor.address(),
        carrier: vm.carrier(),
        chain: fabric_identity::credentials::certificates(&path).expect("certificates"),
        unreachable_since: None,
    };
    let alpha = "node/alpha".parse().expect("a holder");
    vm.authority().revoke_holder(&alpha).expect("revoked");
    let list = vm.at.path().join("authority/crl.pem");
    std::fs::copy(list, vm.at.path().join("vm/web/crl.pem")).expect("copied");
    vm.renew();
    vm.silence();
    let (sender, lost) = bounded(1);
    let way = Arc::clone(&vm.ways[0]);
    let watch = NodeCertificates::watch(
        vec![node],
        std::mem::take(&mut vm.delegations),
        Arc::clone(&vm.credentials),
        move |place, why| {
            let said = (place, why.to_owned(), way.count());
            sender.send(said).expect("the test waits");
        },
    );
    let _watch = watch.expect("a thread");
    let (place, why, count) = lost.recv_timeout(LIMIT).expect("it is lost");
    assert_eq!(place, 1);
    assert!(why.contains("evoked"), "{why}");
    assert_eq!(count, 0, "the donor was asked before");
}

#[test]
fn the_end_waits_for_one_silent_donor_and_not_for_all() {
    let mut vm = Vm::new(3);
    vm.renew();
    vm.silence();
    let lost = |_, why: &str| panic!("no node is watched: {why}");
    let delegations = std::mem::take(&mut vm.delegations);
    let watch = NodeCertificates::watch(vec![], delegations, Arc::clone(&vm.credentials), lost);
    let watch = watch.expect("a thread");
    vm.connected.recv_timeout(LIMIT).expect("one is asked");
    drop(watch);
    assert_eq!(vm.counts(), [1, 0, 0]);
}

#[test]
fn a_node_that_cannot_be_reached_when_its_certificate_expires_has_time_to_show_another() {
    let vm = Vm::new(1);
    let old = vm.at.path().join("old");
    let holder = "node/alpha".parse().expect("a holder");
    let issued = vm.authority().issue(&holder, Validity { days: 0 }, &old);
    issued.expect("a certificate");
    let path = old.join("cert.pem");
    let chain = fabric_identity::credentials::certificates(&path).expect("certificates");
    let nowhere = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let mut node = ShownBy {
        place: 1,
        address: nowhere.local_addr().expect("bound"),
        carrier: vm.carrier(),
        chain: chain.clone(),
        unreachable_since: None,
    };
    drop(nowhere);
    // It expires with the second in which it was issued.
    let deadline = Instant::now() + LIMIT;
    while !node.has_expired() {
        assert!(Instant::now() < deadline, "it does not expire");
        thread::sleep(Duration::from_millis(20));
    }
    node.check(&vm.credentials).expect("it has time");
    node.unreachable_since = Instant::now().checked_sub(NODE_GRACE);
    let why = node.check(&vm.credentials).expect_err("it is lost");
    assert!(why.contains("cannot connect"), "{why}");
    node.address = vm.donor.address();
    node.check(&vm.credentials).expect("it shows another");
    assert!(node.chain != chain && node.unreachable_since.is_none());
}
