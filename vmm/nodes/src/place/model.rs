//! Every order of events, answers and moves between a few nodes, explored with stateright.

use std::collections::VecDeque;

use stateright::{Checker, Model, Property};

use super::{Place, Step, steps};
use crate::message::NodeNumber;

/// An event: its sender, and its number among that one's.
type Event = (NodeNumber, u8);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Message {
    Event(Event),
    Moved(NodeNumber),
    Answer,
    Vcpu(Vec<Event>),
}

/// A defect of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Mutation {
    /// The new owner is notified last.
    OthersFirst,
    /// The owner sends events to the new owner before that one knows.
    SwitchFirst,
    /// The state is sent without waiting for the last answer.
    NoAnswer,
    /// The state is sent without the kept events.
    EventsStay,
    /// The new owner takes what it has kept before it has the state.
    Early,
    /// A node looks up the place of the vCPU, and sends later.
    LookupApart,
}

/// A vCPU that is given away.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Departure {
    owner: NodeNumber,
    to: NodeNumber,
    /// What is left to do.
    steps: VecDeque<Step>,
    waits: bool,
}

/// One vCPU and its nodes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    places: Vec<Place>,
    /// Events that each node keeps.
    inboxes: Vec<Vec<Event>>,
    /// Messages in transit, by sender and receiver.
    channels: Vec<Vec<VecDeque<Message>>>,
    departure: Option<Departure>,
    /// How many events each node has posted.
    posted: Vec<u8>,
    /// Where a node will send its event (only with the mutation).
    looked_up: Vec<Option<NodeNumber>>,
    moves: u8,
    /// What the vCPU has got.
    got: Vec<Event>,
    failure: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// A node posts an event, or only looks up where.
    Post(NodeNumber),
    /// It sends the event where it has looked up.
    Send(NodeNumber, NodeNumber),
    /// The vCPU shall move.
    Move(NodeNumber),
    /// The owner does the next step.
    Step,
    Deliver(NodeNumber, NodeNumber),
    /// The vCPU takes its events.
    Take(NodeNumber),
}

fn at(node: NodeNumber) -> usize {
    node.into()
}

impl World {
    fn new(nodes: u8) -> Self {
        let count = at(nodes);
        Self {
            places: (0..nodes).map(|node| Place::of(0, node)).collect(),
            inboxes: vec![Vec::new(); count],
            channels: vec![vec![VecDeque::new(); count]; count],
            departure: None,
            posted: vec![0; count],
            looked_up: vec![None; count],
            moves: 0,
            got: Vec::new(),
            failure: None,
        }
    }

    fn fail(&mut self, what: impl Into<String>) {
        self.failure.get_or_insert(what.into());
    }

    fn send(&mut self, from: NodeNumber, to: NodeNumber, message: Message) {
        self.channels[at(from)][at(to)].push_back(message);
    }

    fn nodes(&self) -> impl Iterator<Item = NodeNumber> + use<> {
        (0..).take(self.places.len())
    }

    fn post(&mut self, node: NodeNumber, owner: NodeNumber) {
        let event = (node, self.posted[at(node)]);
        self.posted[at(node)] += 1;
        if owner == node {
            self.inboxes[at(node)].push(event);
        } else {
            self.send(node, owner, Message::Event(event));
        }
    }

    fn deliver(&mut self, from: NodeNumber, to: NodeNumber) {
        let Some(message) = self.channels[at(from)][at(to)].pop_front() else {
            return;
        };
        let place = &mut self.places[at(to)];
        match message {
            Message::Event(event) if place.owner(to) == to => self.inboxes[at(to)].push(event),
            Message::Event(event) => self.fail(format!("event {event:?} came to node {to}")),
            Message::Moved(owner) => match place.notified(to, from, owner) {
                Ok(()) => self.send(to, from, Message::Answer),
                Err(error) => self.fail(error.to_string()),
            },
            Message::Answer => {
                if let Some(departure) = &mut self.departure {
                    departure.waits = false;
                }
            }
            Message::Vcpu(events) => match place.came(from) {
                Ok(()) => self.got.extend(events),
                Err(error) => self.fail(error.to_string()),
            },
        }
    }

    fn step(&mut self, mutation: Option<Mutation>) {
        let Some(mut departure) = self.departure.take() else {
            return;
        };
        let Departure { owner, to, .. } = departure;
        match departure.steps.pop_front() {
            Some(Step::Notify(node)) => {
                self.send(owner, node, Message::Moved(to));
                departure.waits = mutation != Some(Mutation::NoAnswer);
            }
            Some(Step::Switch) => self.places[at(owner)] = Place::At(to),
            Some(Step::Give) => {
                let mut kept = std::mem::take(&mut self.inboxes[at(owner)]);
                if mutation == Some(Mutation::EventsStay) {
                    kept.clear();
                }
                self.send(owner, to, Message::Vcpu(kept));
                return;
            }
            None => return self.fail("no step"),
        }
        self.departure = Some(departure);
    }

    /// Whether the vCPU is in the world once, and has got what each node has sent, in order.
    fn check(&self) -> Result<(), String> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let here = self.places.iter().filter(|place| **place == Place::Here);
        let messages = self.channels.iter().flatten().flatten();
        let on_its_way = messages.filter(|message| matches!(message, Message::Vcpu(_)));
        // After the switch it is not here, and its state is not on its way yet.
        let given = self
            .departure
            .iter()
            .filter(|departure| self.places[at(departure.owner)] != Place::Here);
        let count = here.count() + on_its_way.count() + given.count();
        if count != 1 {
            return Err(format!("the vCPU is there {count} times"));
        }
        for node in self.nodes() {
            let of_node = self.got.iter().filter(|(sender, _)| *sender == node);
            let numbers: Vec<u8> = of_node.map(|(_, number)| *number).collect();
            if !numbers.iter().copied().eq((0..).take(numbers.len())) {
                return Err(format!("it has got {numbers:?} of node {node}"));
            }
        }
        Ok(())
    }

    fn check_end(&self) -> Result<(), String> {
        self.check()?;
        let posted: usize = self.posted.iter().copied().map(usize::from).sum();
        if self.got.len() == posted && self.departure.is_none() {
            Ok(())
        } else {
            Err(format!("at the end it has got {:?}", self.got))
        }
    }
}

/// A world to explore.
#[derive(Clone, Debug)]
struct Moves {
    nodes: u8,
    /// How many events each node posts, and how often the vCPU moves, at most.
    events: u8,
    moves: u8,
    mutation: Option<Mutation>,
}

impl Moves {
    fn steps(&self, owner: NodeNumber, to: NodeNumber) -> VecDeque<Step> {
        let others = (0..self.nodes).filter(|node| *node != owner);
        let mut steps: VecDeque<_> = steps(to, others).into();
        match self.mutation {
            // With two nodes there is no other one.
            Some(Mutation::OthersFirst) => steps.swap(0, at(self.nodes) - 2),
            Some(Mutation::SwitchFirst) => {
                steps.retain(|step| *step != Step::Switch);
                steps.push_front(Step::Switch);
            }
            _ => {}
        }
        steps
    }

    fn verdict(&self, world: &World) -> Result<(), String> {
        let mut actions = Vec::new();
        self.actions(world, &mut actions);
        if actions.is_empty() {
            world.check_end()
        } else {
            world.check()
        }
    }

    /// Explores all states. Returns their number, or the shortest way to a failure.
    fn explore(self) -> Result<usize, String> {
        let checker = self.clone().checker().threads(2).spawn_bfs().join();
        match checker.discovery("every state is right") {
            None => Ok(checker.unique_state_count()),
            Some(path) => {
                let verdict = self.verdict(path.last_state());
                Err(format!("{verdict:?} after {:?}", path.into_actions()))
            }
        }
    }
}

impl Model for Moves {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self.nodes)]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        if world.failure.is_some() {
            return;
        }
        for node in world.nodes() {
            match world.looked_up[at(node)] {
                Some(owner) => actions.push(Action::Send(node, owner)),
                None if world.posted[at(node)] < self.events => actions.push(Action::Post(node)),
                None => {}
            }
            let may_take = match world.places[at(node)] {
                Place::Here => world.departure.is_none(),
                Place::Coming(_) => self.mutation == Some(Mutation::Early),
                Place::At(_) => false,
            };
            if may_take && !world.inboxes[at(node)].is_empty() {
                actions.push(Action::Take(node));
            }
            if world.moves < self.moves
                && world.departure.is_none()
                && let Some(owner) = world
                    .nodes()
                    .find(|node| world.places[at(*node)] == Place::Here)
                && owner != node
            {
                actions.push(Action::Move(node));
            }
            for from in world.nodes() {
                if !world.channels[at(from)][at(node)].is_empty() {
                    actions.push(Action::Deliver(from, node));
                }
            }
        }
        if world
            .departure
            .as_ref()
            .is_some_and(|departure| !departure.waits)
        {
            actions.push(Action::Step);
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut world = world.clone();
        match action {
            Action::Post(node) => {
                let owner = world.places[at(node)].owner(node);
                if self.mutation == Some(Mutation::LookupApart) {
                    world.looked_up[at(node)] = Some(owner);
                } else {
                    world.post(node, owner);
                }
            }
            Action::Send(node, owner) => {
                world.looked_up[at(node)] = None;
                world.post(node, owner);
            }
            Action::Move(to) => {
                let owner = world
                    .nodes()
                    .find(|node| world.places[at(*node)] == Place::Here)?;
                world.moves += 1;
                world.departure = Some(Departure {
                    owner,
                    to,
                    steps: self.steps(owner, to),
                    waits: false,
                });
            }
            Action::Step => world.step(self.mutation),
            Action::Deliver(from, to) => world.deliver(from, to),
            Action::Take(node) => {
                let taken = std::mem::take(&mut world.inboxes[at(node)]);
                world.got.extend(taken);
            }
        }
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always(
            "every state is right",
            |model: &Self, world| model.verdict(world).is_ok(),
        )]
    }
}

fn moves(nodes: u8, events: u8, moves: u8) -> Moves {
    Moves {
        nodes,
        events,
        moves,
        mutation: None,
    }
}

#[test]
fn no_event_is_lost_doubled_or_overtaken_while_a_vcpu_moves() {
    for world in [moves(2, 2, 3), moves(3, 1, 2), moves(3, 2, 1)] {
        let states = world.clone().explore().unwrap();
        println!("{world:?}: {states} states");
    }
}

#[test]
fn each_defect_of_the_protocol_is_found() {
    use Mutation::{Early, EventsStay, LookupApart, NoAnswer, OthersFirst, SwitchFirst};
    for mutation in [
        OthersFirst,
        SwitchFirst,
        NoAnswer,
        EventsStay,
        Early,
        LookupApart,
    ] {
        let world = Moves {
            mutation: Some(mutation),
            ..moves(3, 2, 1)
        };
        let found = world.explore().unwrap_err();
        println!("{mutation:?}: {found}");
    }
}

#[test]
fn a_node_cannot_give_away_what_it_does_not_have() {
    let mut place = Place::At(1);
    assert!(place.notified(0, 2, 0).is_err());
    assert!(place.came(1).is_err());
    place.notified(0, 1, 0).unwrap();
    assert_eq!(place, Place::Coming(1));
    assert!(place.notified(0, 1, 0).is_err(), "twice");
    assert!(place.came(2).is_err());
    place.came(1).unwrap();
    assert!(place.notified(0, 1, 2).is_err(), "it is here");
}
