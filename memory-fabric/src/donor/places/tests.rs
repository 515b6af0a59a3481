use super::*;
use std::net::Ipv4Addr;

const MEMORY: Duration = Duration::from_secs(60);

fn host(number: u16) -> IpAddr {
    let [high, low] = number.to_be_bytes();
    Ipv4Addr::new(127, 1, high, low).into()
}

/// Places, and a clock.
struct Bed {
    places: Places,
    now: Instant,
}

impl Bed {
    fn new() -> Self {
        Self {
            places: Places::new(MEMORY),
            now: Instant::now(),
        }
    }

    fn admit(&mut self, from: IpAddr) -> Admission {
        self.places.admit(from, self.now)
    }

    /// A connection that gets a place, at the cost of `victim` if that is one.
    fn arrive(&mut self, from: IpAddr, victim: Option<u64>) -> u64 {
        match self.admit(from) {
            Admission::Admitted(number) if victim.is_none() => number,
            Admission::Instead(number, dropped, _) if victim == Some(dropped) => number,
            other => panic!("{other:?} instead of {victim:?}"),
        }
    }

    fn speak(&mut self, number: u64) {
        assert!(self.places.begin(number, self.now), "no thread");
    }

    fn speaking(&mut self, from: IpAddr) -> u64 {
        let number = self.arrive(from, None);
        self.speak(number);
        number
    }

    /// A connection of a lease from there.
    fn lease(&mut self, from: IpAddr) -> u64 {
        let number = self.speaking(from);
        self.places
            .establish(number, from, Purpose::Lasting, self.now)
            .expect("a place");
        number
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
    }
}

#[test]
fn the_oldest_silent_connection_of_an_address_is_dropped_for_its_next() {
    let mut bed = Bed::new();
    let first = bed.speaking(host(1));
    let second = bed.arrive(host(1), None);
    for _ in 2..WAITING_OF_ADDRESS_MAX {
        bed.arrive(host(1), None);
    }
    bed.arrive(host(1), Some(second));
    assert_eq!(bed.places.waiting(), WAITING_OF_ADDRESS_MAX);
    // Others are not affected, and do not affect it.
    bed.arrive(host(2), None);
    bed.places.end(first, bed.now);
    bed.arrive(host(1), None);
}

#[test]
fn handshakes_of_one_address_do_not_abort_each_other_until_they_are_idle() {
    let mut bed = Bed::new();
    let first = bed.speaking(host(1));
    for _ in 1..WAITING_OF_ADDRESS_MAX {
        bed.speaking(host(1));
    }
    assert_eq!(bed.admit(host(1)), Admission::Refused(Reason::Address));
    bed.pass(IDLE_TIME);
    bed.arrive(host(1), Some(first));
}

#[test]
fn of_all_the_silent_are_dropped_first_then_those_of_the_busiest_address() {
    let mut bed = Bed::new();
    bed.speaking(host(100));
    let crowd = bed.speaking(host(1));
    bed.speaking(host(1));
    let (silent, later) = (bed.arrive(host(2), None), bed.arrive(host(3), None));
    for number in 5..64 {
        bed.speaking(host(1000 + number));
    }
    assert_eq!(bed.places.waiting(), WAITING_MAX);
    let next = bed.arrive(host(4), Some(silent));
    let last = bed.arrive(host(5), Some(later));
    bed.speak(next);
    bed.speak(last);
    bed.arrive(host(6), Some(crowd));
}

#[test]
fn a_connection_from_where_a_lease_is_used_is_dropped_for_no_stranger() {
    let mut bed = Bed::new();
    let vm = host(1);
    let lease = bed.lease(vm);
    // Silent, so it would be the first to be dropped.
    let mine = bed.arrive(vm, None);
    let mut strangers = Vec::new();
    for number in 2..=64 {
        strangers.push(bed.speaking(host(number)));
    }
    let next = bed.arrive(host(100), Some(strangers[0]));
    bed.arrive(vm, Some(next));
    // The address is remembered as long as the lease may last.
    bed.places.end(lease, bed.now);
    bed.pass(MEMORY - Duration::from_millis(1));
    bed.arrive(host(101), Some(strangers[1]));
    bed.pass(Duration::from_millis(1));
    bed.arrive(host(102), Some(mine));
}

#[test]
fn strangers_take_no_place_of_a_lease() {
    let mut bed = Bed::new();
    for number in 0..WAITING_MAX {
        bed.speaking(host(u16::try_from(number).expect("small")));
    }
    assert!(!bed.places.has_thread());
    for number in 0..1000 {
        let stranger = host(1000 + number);
        assert!(matches!(bed.admit(stranger), Admission::Instead(..)));
    }
    assert_eq!((bed.places.waiting(), bed.places.established()), (64, 0));
}

#[test]
fn connections_of_leases_have_a_limit_of_their_own() {
    let mut bed = Bed::new();
    let first = bed.lease(host(0));
    for number in 1..CONNECTIONS_MAX {
        bed.lease(host(u16::try_from(number).expect("small")));
    }
    let more = bed.speaking(host(1));
    let full = bed
        .places
        .establish(more, host(1), Purpose::Lasting, bed.now);
    assert!(
        full.expect_err("full").to_string().contains("3072"),
        "{full:?}"
    );
    bed.places.end(first, bed.now);
    bed.places
        .establish(more, host(1), Purpose::Lasting, bed.now)
        .expect("a place");
    assert_eq!(bed.places.established(), CONNECTIONS_MAX);
    assert_eq!(bed.places.waiting(), 0);
}

#[test]
fn threads_of_dropped_connections_count_until_they_have_ended() {
    let mut bed = Bed::new();
    let numbers: Vec<_> = (0..64).map(|number| bed.speaking(host(number))).collect();
    let Admission::Instead(next, victim, Reason::Total) = bed.admit(host(200)) else {
        panic!("one is dropped");
    };
    assert_eq!(victim, numbers[0]);
    assert!(!bed.places.begin(next, bed.now), "65 threads");
    bed.places.end(victim, bed.now);
    assert!(bed.places.begin(next, bed.now));
}

#[test]
fn silent_connections_are_dropped_after_their_time_alone() {
    let mut bed = Bed::new();
    let (silent, speaking) = (bed.arrive(host(1), None), bed.speaking(host(1)));
    let began = bed.now;
    bed.pass(Duration::from_secs(1));
    let later = bed.arrive(host(1), None);
    assert_eq!(bed.places.silent_since(), Some(began));
    assert_eq!(bed.places.drop_silent(began), [silent]);
    assert_eq!(bed.places.silent().collect::<Vec<_>>(), [later]);
    bed.places.end(speaking, bed.now);
    assert_eq!(bed.places.waiting(), 1);
}

#[test]
fn hosts_of_one_network_of_ipv6_are_one_address_and_mapped_ones_are_ipv4() {
    let parse = |text: &str| network(text.parse().expect("an address"));
    assert_eq!(parse("2001:db8:1:2:3::4"), parse("2001:db8:1:2::9"));
    assert_ne!(parse("2001:db8:1:2::1"), parse("2001:db8:1:3::1"));
    assert_eq!(parse("::ffff:10.0.0.1"), parse("10.0.0.1"));
    assert_ne!(parse("10.0.0.1"), parse("10.0.0.2"));
}

#[test]
fn few_addresses_are_remembered() {
    let mut bed = Bed::new();
    let kept = bed.lease(host(0));
    for number in 1..3 * u16::try_from(CONNECTIONS_MAX).expect("small") {
        let connection = bed.lease(host(number));
        bed.pass(Duration::from_micros(1));
        bed.places.end(connection, bed.now);
    }
    // Beside the two that were connected when the last one was established.
    assert_eq!(bed.places.known.len(), KNOWN_MAX + 2);
    assert!(bed.places.is_known(host(0), bed.now));
    assert!(!bed.places.is_known(host(1), bed.now));
    bed.places.end(kept, bed.now);
}

#[test]
fn resting_connections_take_no_place_of_others_and_wake_beside_them() {
    let mut bed = Bed::new();
    let control = |bed: &mut Bed| {
        let number = bed.speaking(host(0));
        let (places, now) = (&mut bed.places, bed.now);
        let established = places.establish(number, host(0), Purpose::Control, now);
        established.map(|()| number)
    };
    let resting: Vec<_> = (0..CONNECTIONS_MAX + 100)
        .map(|_| {
            let number = control(&mut bed).expect("a place");
            bed.places.rest(number).expect("a place");
            number
        })
        .collect();
    assert_eq!(bed.places.resting(), resting.len());
    for _ in 0..CONNECTIONS_MAX {
        bed.lease(host(0));
    }
    assert_eq!(bed.places.established(), resting.len() + CONNECTIONS_MAX);
    // All places with threads are taken, except those for control connections.
    let full = |result: Result<(), Full>| result.expect_err("full").to_string();
    assert!(full(bed.places.wake(resting[0], Purpose::Lasting)).contains("3072"));
    for number in &resting[..CONTROL_SPARE - 1] {
        bed.places.wake(*number, Purpose::Control).expect("a place");
    }
    let last = control(&mut bed).expect("the last of them");
    assert!(full(bed.places.stay(last)).contains("3072"));
    assert!(control(&mut bed).is_err());
    full(bed.places.wake(resting[300], Purpose::Control));
    // One that has ended, or comes to rest, makes room.
    bed.places.end(resting[0], bed.now);
    bed.places
        .wake(resting[300], Purpose::Control)
        .expect("a place");
    bed.places.rest(last).expect("a place");
    bed.places
        .wake(resting[301], Purpose::Control)
        .expect("a place");
    // What rests is counted until it ends.
    let before = bed.places.resting();
    bed.places.end(last, bed.now);
    assert_eq!(bed.places.resting(), before - 1);
    full(bed.places.wake(last, Purpose::Control));
}

#[test]
fn a_control_connection_that_could_not_rest_needs_a_lasting_thread() {
    let mut bed = Bed::new();
    let control = |bed: &mut Bed| {
        let number = bed.speaking(host(0));
        let (places, now) = (&mut bed.places, bed.now);
        let established = places.establish(number, host(0), Purpose::Control, now);
        if established.is_err() {
            places.end(number, now);
        }
        established.map(|()| number)
    };
    for _ in 1..RESTING_MAX {
        let number = control(&mut bed).expect("a place");
        bed.places.rest(number).expect("a place");
    }
    // The last place is for this one, which does not rest yet.
    let last = control(&mut bed).expect("a place");
    let lasting = control(&mut bed).expect("a thread of its own");
    for _ in 1..CONNECTIONS_MAX {
        bed.lease(host(0));
    }
    let full = control(&mut bed).expect_err("it would be refused later");
    assert!(full.to_string().contains("3072"), "{full}");
    bed.places.stay(lasting).expect("it keeps its thread");
    bed.places.rest(last).expect("it was promised");
    assert_eq!(bed.places.resting(), RESTING_MAX);
    // A place that is not used any more is for others.
    bed.places.end(last, bed.now);
    let next = control(&mut bed).expect("a place");
    assert!(control(&mut bed).is_err());
    bed.places.end(next, bed.now);
    let next = control(&mut bed).expect("a place");
    bed.places.rest(next).expect("a place");
}
