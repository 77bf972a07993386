from common import FORM, QUESTIONS, ROOT, STREAM, URL, add
from langchain_core.messages import HumanMessage

KIND, _, HOW = FORM.partition("-")
if KIND == "messages":
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model="policy", base_url=ROOT, api_key="unused", max_tokens=500, max_retries=0)
else:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="policy",
        base_url=URL,
        api_key="unused",
        max_retries=0,
        use_responses_api=KIND == "responses",
        streaming=STREAM,
    )


def by_hand():
    """A graph of one's own."""
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    bound = model.bind_tools([add])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


def ready_made():
    from langchain.agents import create_agent

    return create_agent(model, tools=[add])


agent = by_hand() if HOW == "graph" else ready_made()
messages = []
for question in QUESTIONS:
    state = {"messages": [*messages, HumanMessage(question)]}
    if STREAM:
        for mode, part in agent.stream(state, stream_mode=["messages", "values"]):
            if mode == "values":
                messages = part["messages"]
    else:
        messages = agent.invoke(state)["messages"]
    print(messages[-1].text)
